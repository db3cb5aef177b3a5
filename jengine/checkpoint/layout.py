"""The files of a checkpoint, and how to recognize a complete one.

    work_dir/
      last_checkpoint       the path of the newest regular checkpoint, as text
      epoch_5/
        state/              the arrays, in Orbax's format
        meta.json           the rest: `meta` (iter, epoch, seed, config), schedules, hook states, message hub
        manifest.json       written last: the size of every other file

A checkpoint is written under `epoch_5.incoming` and renamed once its manifest is there; one that goes is renamed to
`epoch_5.outgoing` before its files are removed. Whatever instant a process dies at, what bears a checkpoint's own
name is whole, and the manifest tells when the disk has lost something since.
"""

import json
import logging
import math
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


class CorruptCheckpointError(ValueError):
    """A checkpoint with a missing or truncated file."""


def write_manifest(directory: Path, *, latest: bool, iteration: int | None) -> None:
    """Seals `directory`: lists its files with their sizes.

    Args:
      directory: holds `state/` and `meta.json`, complete.
      latest: whether a resumed run may start from it in preference to others.
      iteration: training iterations behind it; None keeps it out of the search for something to resume from.
    """
    files = {str(p.relative_to(directory)): p.stat().st_size for p in sorted(directory.rglob("*")) if p.is_file()}
    sealed = {"format": 1, "latest": latest, "iter": iteration, "files": files}
    (directory / MANIFEST).write_text(json.dumps(sealed, indent=1))


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
            found = (path / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes of {size}"
    return None


def read_pointer(work_dir: Path) -> Path | None:
    """What `last_checkpoint` names, whether it is there or not; None without that file."""
    try:
        return Path((work_dir / POINTER).read_text().strip())
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_pointer(work_dir: Path, path: str) -> None:
    """Makes `last_checkpoint` name `path`, in one instant."""
    work_dir.mkdir(parents=True, exist_ok=True)
    fresh = work_dir / f"{POINTER}.new"
    fresh.write_text(path)
    fresh.replace(work_dir / POINTER)


def find_latest(work_dir: str | os.PathLike[str]) -> str | None:
    """The newest whole checkpoint of a run.

    The one that `last_checkpoint` names, if it is whole; else, with a warning, the one with the most iterations beside
    it or in the work dir, regular ones before best ones.

    Args:
      work_dir: the run's directory; it need not exist.

    Returns:
      Its absolute path, or None when there is no whole checkpoint.
    """
    root = Path(work_dir).absolute()
    directories = [root]
    named = read_pointer(root)
    if named is not None:
        problem = validate_checkpoint(named)
        if problem is None:
            return str(named)
        _LOGGER.warning("checkpoint %s, named by %s, is skipped: %s", named, root / POINTER, problem)
        if named.parent.is_dir() and named.parent != root:
            directories.append(named.parent)
    candidates = []
    for path in (path for directory in directories for path in _bundles(directory)):
        problem = validate_checkpoint(path)
        if problem is None:
            manifest = json.loads((path / MANIFEST).read_text())
            if manifest["iter"] is not None:
                candidates.append((manifest["latest"], manifest["iter"], path.stat().st_mtime_ns, str(path)))
        elif path != named and path.suffix != INCOMING:
            _LOGGER.warning("checkpoint %s is skipped: %s", path, problem)
    return max(candidates)[-1] if candidates else None


def list_checkpoints(directory: str | os.PathLike[str]) -> list[str]:
    """The absolute paths of all checkpoints directly in `directory`, by name; torn ones and one being written too."""
    return sorted(str(path) for path in _bundles(Path(directory).absolute()))


def resolve(path: str | os.PathLike[str]) -> str:
    """The absolute path of the checkpoint that `path` means: itself, or the newest one of a work dir.

    Raises:
      FileNotFoundError: nothing is there, or no checkpoint is in the directory; the message lists what is.
      CorruptCheckpointError: it is a checkpoint, but not whole.
    """
    path = Path(path).absolute()
    replacement = path.with_name(path.name + INCOMING)
    if not path.exists() and validate_checkpoint(replacement) is None:  # killed between the renames of a replacement
        return str(replacement)
    if not path.is_dir():
        if path.exists():
            raise FileNotFoundError(f"{path} is a file; a checkpoint is a directory that holds {STATE}/ and {META}")
        raise FileNotFoundError(f"there is no checkpoint {path}; {_there_is(path.parent)}")
    if _is_bundle(path):
        if (problem := validate_checkpoint(path)) is not None:
            raise CorruptCheckpointError(f"checkpoint {path} is not whole: {problem}")
        return str(path)
    if (latest := find_latest(path)) is not None:
        return latest
    raise FileNotFoundError(
        f"{path} is neither a checkpoint ({STATE}/, {META}, {MANIFEST}) nor a work dir with whole checkpoints; "
        f"{_there_is(path)}"
    )


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The part of a checkpoint that is not arrays: `meta`, schedules, hook states, message hub.

    Raises:
      FileNotFoundError, CorruptCheckpointError: as `resolve`.
    """
    return decode_meta((Path(resolve(path)) / META).read_text())


def encode_meta(rest: Mapping[str, Any]) -> str:
    """Return `rest` as JSON text; NumPy scalars and arrays become numbers and lists, tuples lists.

    JSON has no NaN and no infinity: they are written as `{"$float": "NaN"}`, which `decode_meta` reads.

    Raises:
      TypeError: something that JSON has no form for, with its dotted place.
    """
    # a line for each entry, since an indent would have Python encode what is written in C
    lines = [f" {json.dumps(key)}: {_encode_entry(value)}" for key, value in _plain(rest, "checkpoint").items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def decode_meta(text: str) -> dict[str, Any]:
    """Return what `encode_meta` was given, in JSON's types; a bare NaN of earlier versions is read too."""
    return json.loads(text, object_hook=lambda entry: float(entry[_FLOAT]) if entry.keys() == {_FLOAT} else entry)


def _encode_entry(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:  # rare, so that the usual entry is not searched
        return json.dumps(_tag_nonfinite(value), allow_nan=False)


def _tag_nonfinite(value: Any) -> Any:
    """Return a value of JSON's types with each NaN and infinity as an object."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: _tag_nonfinite(entry) for key, entry in value.items()}
    return [_tag_nonfinite(entry) for entry in value] if isinstance(value, list) else value


_FLOAT = "$float"
_AS_THEY_ARE = frozenset({type(None), str, bool, int, float})


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple) and _AS_THEY_ARE.issuperset(map(type, value)):  # histories are long
        return list(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: the keys of what a checkpoint stores are strings")
        return {key: _plain(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, f"{where}.{i}") for i, entry in enumerate(value)]
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return value.tolist()
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot store: give numbers, text, lists or dicts")


def _is_bundle(path: Path) -> bool:
    return any((path / name).exists() for name in (MANIFEST, META, STATE))


def _bundles(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from (p for p in directory.iterdir() if p.suffix != OUTGOING and p.is_dir() and _is_bundle(p))


def _there_is(directory: Path) -> str:
    if not directory.is_dir():
        return f"the directory {directory} does not exist either"
    names = sorted(p.name + "/" * p.is_dir() for p in directory.iterdir())
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return f"{directory} holds {shown}" if names else f"{directory} is empty"
