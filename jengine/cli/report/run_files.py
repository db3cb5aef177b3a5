"""Read the files of a run that a report shows; they may be those of a run that is training."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jengine.checkpoint.lock import is_locked
from jengine.config import parse_config
from jengine.errors import ConfigError
from jengine.runner.run_record import FILE as RECORD

_SCALARS = pathlib.PurePath("vis_data", "scalars.json")
_TIMESTAMP = re.compile(r"\d{8}_\d{6}(_\d+)?")
_STEP = re.compile(r"(.+)_(\d+)")  # the name of an image and its step
_IMAGE_DIR = "vis_image"


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """Hold the contents of a run's log directory.

    Attributes:
      log_dir: the directory of its log files.
      status: 'training', 'finished', why it stopped, or '' if unknown.
      record: the contents of `run.json`; empty if there is none.
      config: its resolved config; empty if it has none.
      rows: the lines of `vis_data/scalars.json`.
      images: the PNG files and their steps, in order, by name of the image.
      test: the metrics of a test at the end of the run; empty if there was none.
      notes: what could not be read, and why.
    """

    log_dir: pathlib.Path
    status: str
    record: Mapping[str, Any]
    config: Mapping[str, Any]
    rows: list[dict[str, Any]]
    images: Mapping[str, list[tuple[int, pathlib.Path]]]
    test: Mapping[str, Any]
    notes: list[str]


def find_runs(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the log directories that `path` stands for.

    Args:
      path: a log directory; a work dir, for its newest run; or a directory of work dirs, for the newest run of each.

    Raises:
      FileNotFoundError: the directory has no run.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"WORK_DIR must be a directory, got {path}, which does not exist")
    if _is_log_dir(path):
        return [path]
    found = [newest for directory in (path, *_directories(path)) if (newest := _newest_run(directory))]
    if not found:
        raise FileNotFoundError(f"WORK_DIR must contain a run (TIMESTAMP/{RECORD} or TIMESTAMP/{_SCALARS}), got {path}")
    return found[:1] if _newest_run(path) else found


def name_runs(log_dirs: list[pathlib.Path]) -> list[str]:
    """Return a short name for each run: that of its work dir, extended only where two are equal."""
    paths = [path.absolute() for path in log_dirs]
    work_dirs = [path.parent if _TIMESTAMP.fullmatch(path.name) else path for path in paths]
    names = [path.name for path in work_dirs]
    longer = [f"{path.parent.name}/{path.name}" for path in work_dirs]
    for candidates in (longer, [f"{name}/{path.name}" for name, path in zip(names, paths, strict=True)], paths):
        names = [str(new) if names.count(old) > 1 else old for old, new in zip(names, candidates, strict=True)]
    return names


def read_run(log_dir: pathlib.Path) -> RunFiles:
    """Read a run.

    Args:
      log_dir: the directory of its log files.
    """
    notes: list[str] = []
    record = _read_json(log_dir / RECORD, notes)
    config = _read_config(log_dir / "vis_data" / "config.py", notes)
    return RunFiles(
        log_dir=log_dir,
        status=_find_status(log_dir, record),
        record=record,
        config=config,
        rows=_read_rows(log_dir / _SCALARS, notes),
        images=_list_images(log_dir / "vis_data", config),
        test=_read_json(log_dir / f"{log_dir.name}.json", notes),
        notes=notes,
    )


def _is_log_dir(path: pathlib.Path) -> bool:
    return (path / RECORD).is_file() or (path / _SCALARS).is_file()


def _directories(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(child for child in path.iterdir() if child.is_dir())


def _newest_run(work_dir: pathlib.Path) -> pathlib.Path | None:
    """Return the log directory with the latest start time, which is its name; None if there is none."""
    return max(filter(_is_log_dir, _directories(work_dir)), default=None)


def _find_status(log_dir: pathlib.Path, record: Mapping[str, Any]) -> str:
    """Return the status in the record, except of a run that was killed and could not update it."""
    is_training = is_locked(log_dir.parent) and _newest_run(log_dir.parent) == log_dir
    if is_training or not record:
        return "training" if is_training else ""
    status = str(record["sessions"][-1]["status"])
    return "stopped" if status == "training" else status


def _read_json(path: pathlib.Path, notes: list[str]) -> dict[str, Any]:
    """Return the object in a file; {} if it does not exist, or cannot be read, which is noted."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}


def _read_config(path: pathlib.Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return parse_config(path.read_text())
    except ConfigError as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}


def _read_rows(path: pathlib.Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        notes.append(
            f"{_SCALARS} does not exist: a LocalVisBackend of the visualizer writes it with the first log line"
        )
        return []
    rows, unreadable = [], 0
    for line in path.read_text().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            unreadable += line.endswith("\n")  # the last line may be incomplete while the run writes it
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
        else:
            unreadable += 1
    if unreadable:
        notes.append(f"{unreadable} lines of {_SCALARS} cannot be read")
    return rows


def _list_images(vis_dir: pathlib.Path, config: Mapping[str, Any]) -> dict[str, list[tuple[int, pathlib.Path]]]:
    """Return the images in the directories to which the backends of the config write them."""
    backends = (config.get("visualizer") or {}).get("vis_backends") or []
    directories = dict.fromkeys([_IMAGE_DIR, *(backend.get("img_save_dir", _IMAGE_DIR) for backend in backends)])
    images: dict[str, list[tuple[int, pathlib.Path]]] = {}
    for root in (vis_dir / directory for directory in directories):
        for path in sorted(root.rglob("*.png")):
            stem = path.relative_to(root).with_suffix("").as_posix()
            match = _STEP.fullmatch(stem)
            name, step = (match[1], int(match[2])) if match else (stem, 0)
            images.setdefault(name, []).append((step, path))
    return {name: sorted(files) for name, files in sorted(images.items())}
