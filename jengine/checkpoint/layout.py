"""Define the files of a checkpoint, find checkpoints, and check that they are complete.

    work_dir/
      last_checkpoint       the path of the newest regular checkpoint, as text
      epoch_5/
        state/              the arrays, in Orbax's format
        meta.json           everything else: `meta` (iter, epoch, seed, config), schedules, hook states, message hub
        manifest.json       written last: the size of every other file

A checkpoint is written to `epoch_5.incoming` and renamed once its manifest is written. To remove it, it is renamed to
`epoch_5.outgoing` first. So a directory with a checkpoint's final name is complete whenever the process is killed, and
the manifest reveals files that were lost or truncated later.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STATE = "state"
META = "meta.json"
MANIFEST = "manifest.json"
POINTER = "last_checkpoint"
INCOMING = ".incoming"
OUTGOING = ".outgoing"

_LOGGER = logging.getLogger("jengine")
_JSON_SCALARS = frozenset({type(None), str, bool, int, float})


class CorruptCheckpointError(ValueError):
    """Signal a checkpoint with a missing or truncated file."""


def write_manifest(directory: Path, *, latest: bool, iteration: int | None) -> None:
    """Write the list of the files in `directory` with their sizes, which marks the checkpoint as complete.

    Args:
      directory: contains `state/` and `meta.json`, complete.
      latest: whether a resumed run prefers it to other checkpoints.
      iteration: training iterations done; None excludes it from the search for a checkpoint to resume from.
    """
    files = {str(p.relative_to(directory)): p.stat().st_size for p in sorted(directory.rglob("*")) if p.is_file()}
    manifest = {"format": 1, "latest": latest, "iter": iteration, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))


def validate_checkpoint(path: Path) -> str | None:
    """Return why `path` is not a complete checkpoint, or None if it is one."""
    if not path.exists():
        return "it does not exist"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return f"{MANIFEST} is missing, so the save was never finished"
    except ValueError:
        return f"{MANIFEST} is not valid JSON"
    for name, size in manifest["files"].items():
        try:
            actual = (path / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if actual != size:
            return f"{name} has {actual} bytes of {size}"
    return None


def read_pointer(work_dir: Path) -> Path | None:
    """Return the path in `last_checkpoint`, whether it exists or not; None if there is no such file."""
    try:
        return Path((work_dir / POINTER).read_text().strip())
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_pointer(work_dir: Path, path: str) -> None:
    """Point `last_checkpoint` to `path`, atomically."""
    work_dir.mkdir(parents=True, exist_ok=True)
    temporary = work_dir / f"{POINTER}.new"
    temporary.write_text(path)
    temporary.replace(work_dir / POINTER)


def find_latest(work_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of a run.

    This is the target of `last_checkpoint` if it is complete. Otherwise a warning is logged, and the result is the
    checkpoint with the most iterations in the work dir or next to that target; regular ones come before best ones.

    Args:
      work_dir: the run's directory; it may be missing.

    Returns:
      Its absolute path, or None if there is no complete checkpoint.
    """
    root = Path(work_dir).absolute()
    directories = [root]
    target = read_pointer(root)
    if target is not None:
        problem = validate_checkpoint(target)
        if problem is None:
            return str(target)
        _LOGGER.warning("skipped checkpoint %s, the target of %s: %s", target, root / POINTER, problem)
        if target.parent.is_dir() and target.parent != root:
            directories.append(target.parent)
    candidates = []
    for path in (path for directory in directories for path in _iter_checkpoints(directory)):
        problem = validate_checkpoint(path)
        if problem is None:
            manifest = json.loads((path / MANIFEST).read_text())
            if manifest["iter"] is not None:
                candidates.append((manifest["latest"], manifest["iter"], path.stat().st_mtime_ns, str(path)))
        elif path != target and path.suffix != INCOMING:
            _LOGGER.warning("skipped checkpoint %s: %s", path, problem)
    return max(candidates)[-1] if candidates else None


def list_checkpoints(directory: str | os.PathLike[str]) -> list[str]:
    """Return the absolute paths of all checkpoints directly in `directory`, by name, including incomplete ones."""
    return sorted(str(path) for path in _iter_checkpoints(Path(directory).absolute()))


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a checkpoint, given the checkpoint or a work dir for its newest one.

    Raises:
      FileNotFoundError: the path does not exist, or the directory has no checkpoint; the message lists its contents.
      CorruptCheckpointError: the checkpoint is incomplete.
    """
    path = Path(path).absolute()
    replacement = path.with_name(path.name + INCOMING)
    if not path.exists() and validate_checkpoint(replacement) is None:  # killed between the renames of a replacement
        return str(replacement)
    if not path.is_dir():
        if path.exists():
            raise FileNotFoundError(f"a checkpoint must be a directory with {STATE}/ and {META}, got the file {path}")
        raise FileNotFoundError(f"there is no checkpoint {path}; {_list_contents(path.parent)}")
    if _is_checkpoint(path):
        if (problem := validate_checkpoint(path)) is not None:
            raise CorruptCheckpointError(f"checkpoint {path} is corrupt: {problem}")
        return str(path)
    if (latest := find_latest(path)) is not None:
        return latest
    raise FileNotFoundError(
        f"{path} is neither a checkpoint ({STATE}/, {META}, {MANIFEST}) nor a work dir with complete checkpoints; "
        f"{_list_contents(path)}"
    )


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read everything but the arrays of a checkpoint: `meta`, schedules, hook states, message hub.

    Raises:
      FileNotFoundError, CorruptCheckpointError: as `resolve`.
    """
    return json.loads((Path(resolve(path)) / META).read_text())


def encode_meta(meta: Mapping[str, Any]) -> str:
    """Return `meta` as JSON text; NumPy scalars and arrays become numbers and lists, tuples become lists.

    Raises:
      TypeError: a value that JSON cannot represent; the message has its dotted path.
    """
    # Write one line per entry. With `indent`, Python would not use its encoder in C.
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in _to_plain(meta, "checkpoint").items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _to_plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple) and _JSON_SCALARS.issuperset(map(type, value)):  # fast path: histories are long
        return list(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the keys of `{path}` must be strings, got {key!r}")
        return {key: _to_plain(entry, f"{path}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(entry, f"{path}.{i}") for i, entry in enumerate(value)]
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return value.tolist()
    raise TypeError(f"`{path}` must be a number, a string, a list or a dict, got {type(value).__name__}")


def _is_checkpoint(path: Path) -> bool:
    return any((path / name).exists() for name in (MANIFEST, META, STATE))


def _iter_checkpoints(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from (p for p in directory.iterdir() if p.suffix != OUTGOING and p.is_dir() and _is_checkpoint(p))


def _list_contents(directory: Path) -> str:
    """Return the contents of `directory` as the end of an error message."""
    if not directory.is_dir():
        return f"the directory {directory} does not exist either"
    names = sorted(p.name + "/" * p.is_dir() for p in directory.iterdir())
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return f"{directory} contains {shown}" if names else f"{directory} is empty"
