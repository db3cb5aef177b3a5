"""Run files that a report shows, perhaps while the run is training."""

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.checkpoint.lock import is_locked
from jengine.config.dump import parse_config
from jengine.config.errors import ConfigError, did_you_mean
from jengine.config.work_dir import RECORD
from jengine.extras.report.foreign_files import ForeignFiles, conform, get_dict, is_number
from jengine.extras.report.remote import SCALARS, TIMESTAMP, fetch_runs, is_training, origin
from jengine.extras.report.run_metrics import Points, read_curves
from jengine.extras.report.tests import read_evaluations, read_tests

# In the work dir of a sweep's run: `overrides`, and `error` or `pruned`.
TRIAL = "trial.json"
_STEP = re.compile(r"(.+)_(\d+)")  # the name of an image and its step
_IMAGE_DIR = "vis_image"
_RECORD_FORM: dict[str, Any] = {
    **dict.fromkeys(("seed", "max_iters", "max_epochs", "epoch_length"), float),
    "model": dict.fromkeys(("tensors", "parameters", "bytes"), float),
    "groups": {"columns": [str], "rows": [[str]]},
    "sessions": [
        {
            **dict.fromkeys(("started", "updated", "status", "devices"), str),
            **dict.fromkeys(("first_iter", "iter", "epoch"), float),
            "versions": {str: str},
            "seconds": {str: float},
        }
    ],
}
STALLS = "stalls.json"
_STALLS_FORM: dict[str, Any] = {
    "slowest": [{"seconds": float, "iteration": float, "cause": str, "place": str}],
    "intervals": [{"iteration": float, "seconds": {str: float}}],
}


@dataclasses.dataclass(frozen=True)
class ReportedRun:
    """Contents of a run's log directory."""

    files: ForeignFiles  # reads the images
    notes: list[str]  # what could not be read, and why
    log_dir: pathlib.Path
    status: str  # 'training', 'finished', why it stopped, or '' if unknown
    record: Mapping[str, Any]  # `run.json`; empty if there is none
    config: Mapping[str, Any]  # resolved; empty if there is none
    rows: list[dict[str, Any]]  # the lines in `vis_data/scalars.json`
    # steps and PNG files, in order, by image name
    images: Mapping[str, list[tuple[int, pathlib.Path]]]
    # the tests of its weights, the newest last, with the entries of `tests.json`
    tests: Sequence[Mapping[str, Any]] = ()
    # `trial.json`; empty unless it is of a sweep
    trial: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # `stalls.json`: the slowest iterations, and seconds by cause; empty if there is none
    stalls: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def curves(self) -> tuple[dict[tuple[str, str], Points], list[str]]:
        """The curves by mode and name, and the names of values that are not numbers.

        See `read_curves`.
        """
        return read_curves(self.rows)

    @property
    def test(self) -> Mapping[str, float]:
        """The metrics of the newest test; empty if there was none."""
        return self.tests[-1]["metrics"] if self.tests else {}

    @property
    def iter(self) -> int:
        """The number of iterations trained."""
        iterations = [session.get("iter", 0) for session in self.record["sessions"]]
        return int(max(iterations + [x[-1] for x, _ in self.curves[0].values()], default=0))

    @property
    def work_dir(self) -> pathlib.Path:
        """The directory with the checkpoints: the log directory itself if a trial failed before
        it had one.
        """
        return self.log_dir.parent if is_training(self.log_dir) else self.log_dir


def read_runs(work_dirs: Sequence[str]) -> dict[str, ReportedRun]:
    """Read runs (see `find_runs`) and return them by name.

    The first has notes about what was skipped.

    Of several paths, files and directories without a run are skipped: `work_dirs/*` has them too.
    """
    skipped: list[str] = []
    found: list[pathlib.Path] = []
    empty: dict[str, NoRunError] = {}
    for path in work_dirs:
        try:
            found += find_runs(fetch_runs(path, (TRIAL,)), skipped)
        except NoRunError as error:
            empty[path] = error
    if not found:
        raise next(iter(empty.values()))
    if empty:
        skipped.append(f"left out, as they have no run: {', '.join(empty)}")
    log_dirs = list(dict.fromkeys(found))
    runs = dict(zip(name_runs(log_dirs), map(read_run, log_dirs), strict=True))
    next(iter(runs.values())).notes.extend(skipped)
    return runs


class NoRunError(FileNotFoundError):
    """Error of a file, or of a directory without a run."""


def find_runs(path: pathlib.Path, notes: list[str] | None = None) -> list[pathlib.Path]:
    """Return the log directories that `path` stands for: itself, the newest run in a work dir, or
    in several.

    A sweep's run that failed before it had a log directory is found as its work dir.
    `notes` gets the directories that are skipped, because they cannot be read or lead out of
    `path`.
    """
    if path.is_file():
        raise NoRunError(f"WORK_DIR must be a directory, got the file {path}")
    if not path.is_dir():
        raise FileNotFoundError(
            f"WORK_DIR must be a directory, got {path}, which does not exist{suggest_path(path)}"
        )
    if is_training(path):
        return [path]
    files = ForeignFiles(path)
    found = [
        newest
        for directory in (path, *_directories(files, path))
        if (newest := _newest_run(directory, files))
    ]
    if notes is not None:
        notes += dict.fromkeys(files.notes)
    if not found:
        reasons = "".join(f"; {note}" for note in dict.fromkeys(files.notes))
        if any((child / SCALARS).is_file() for child in (path, *_directories(files, path))):
            reasons += "; it has only tests, which are shown with the training of their weights"
        raise NoRunError(
            f"WORK_DIR must contain a run (TIMESTAMP/{RECORD} or TIMESTAMP/{SCALARS}), got "
            f"{path}{reasons}"
        )
    # A work dir is itself a run, even if directories below it look like runs.
    return found[:1] if _newest_run(path, files) else found


def name_runs(log_dirs: list[pathlib.Path]) -> list[str]:
    """Return a short name for each run: the work dir name, extended only where two are equal.

    >>> name_runs([pathlib.Path("/a/digits/20250101_000000"), pathlib.Path("/b/text")])
    ['digits', 'text']
    """
    paths = [path.absolute() for path in log_dirs]
    work_dirs = [path.parent if TIMESTAMP.fullmatch(path.name) else path for path in paths]
    names = [path.name for path in work_dirs]
    longer = [f"{path.parent.name}/{path.name}" for path in work_dirs]
    for candidates in (
        longer,
        [f"{name}/{path.name}" for name, path in zip(names, paths, strict=True)],
        paths,
    ):
        names = [
            str(new) if names.count(old) > 1 else old
            for old, new in zip(names, candidates, strict=True)
        ]
    return names


def read_run(log_dir: pathlib.Path) -> ReportedRun:
    """Read a run, which may be from anyone; nothing outside the log directory is read."""
    files = ForeignFiles(log_dir)
    if not is_training(log_dir):
        trial = _read_trial(log_dir)
        notes = [trial["error"]] if "error" in trial else []
        status = "failed" if notes else "waiting"
        return ReportedRun(files, notes, log_dir, status, {"sessions": []}, {}, [], {}, (), trial)
    record = _read_record(files)
    config = _read_config(files)
    trial = _read_trial(log_dir.parent)
    status = "pruned" if trial.get("pruned") else _find_status(log_dir, record)
    if "error" in trial and status not in ("training", "finished"):
        status = "failed"
    return ReportedRun(
        files,
        files.notes,
        log_dir,
        status,
        record,
        config,
        rows=_add_evaluations(_read_rows(files), files),
        trial=trial,
        stalls=conform(files.read_json(files.root / STALLS), _STALLS_FORM, STALLS, []) or {},
        images=_list_images(files, config),
        tests=read_tests(files),
    )


def _directories(files: ForeignFiles, path: pathlib.Path) -> list[pathlib.Path]:
    """Return the directories in a path, without those outside the root of `files`."""
    try:
        return sorted(child for child in path.iterdir() if child.is_dir() and files.find(child))
    except OSError as error:
        files.note(path, error.strerror)
        return []


def _newest_run(work_dir: pathlib.Path, files: ForeignFiles) -> pathlib.Path | None:
    """Return the log directory with the latest start time, which is the name.

    A trial without one itself; else None.
    """
    trial = work_dir if (work_dir / TRIAL).is_file() else None
    return max(filter(is_training, _directories(files, work_dir)), default=trial)


def _find_status(log_dir: pathlib.Path, record: Mapping[str, Any]) -> str:
    """Return the status in the record, except of a run that was killed and could not update it."""
    work_dir = log_dir.parent
    is_training = (
        is_locked(origin(work_dir)) and _newest_run(work_dir, ForeignFiles(work_dir)) == log_dir
    )
    if is_training or not record["sessions"]:
        return "training" if is_training else ""
    status = record["sessions"][-1].get("status", "")
    return "stopped" if status == "training" else status


def _read_trial(work_dir: pathlib.Path) -> dict[str, Any]:
    """Return what a sweep wrote about its run; {} for another run."""
    trial = ForeignFiles(work_dir).read_json(work_dir / TRIAL)
    forms = {"overrides": dict, "error": str, "pruned": bool}
    return {name: trial[name] for name, form in forms.items() if isinstance(trial.get(name), form)}


def _read_record(files: ForeignFiles) -> dict[str, Any]:
    """Return the entries in `run.json` that have the form which a run writes."""
    problems: list[str] = []
    record = conform(files.read_json(files.root / RECORD), _RECORD_FORM, RECORD, problems)
    if problems:
        files.notes.append(
            f"{len(problems)} entries of {RECORD} have another form: {', '.join(problems[:3])}"
        )
    is_complete = (
        set(_RECORD_FORM["model"]) <= set(record.get("model", ()))
        and len(record.get("groups", ())) == 2
    )
    groups = {} if is_complete else {"model": None, "groups": None}
    return {"sessions": [], **record, **groups}


def _read_config(files: ForeignFiles) -> dict[str, Any]:
    path = files.root / "vis_data" / "config.py"
    text = files.read_text(path)
    if text is None:
        return {}
    try:
        return parse_config(text, arrays=False)
    except ConfigError as error:
        files.note(path, error)
        return {}


def _read_rows(files: ForeignFiles) -> list[dict[str, Any]]:
    path = files.root / SCALARS
    text = files.read_text(path)
    if text is None:
        if not os.path.lexists(path):
            files.notes.append(
                f"{SCALARS} does not exist: a LocalVisBackend of the visualizer writes it with "
                "the first log line"
            )
        return []
    rows = []
    unreadable = 0
    for line in text.splitlines(keepends=True):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            # the last line may be incomplete while the run writes it
            unreadable += line.endswith("\n")
            continue
        # A line has a position: a step, and perhaps an iteration and a mode.
        is_numbered = (
            isinstance(row, dict) and is_number(row.get("step")) and is_number(row.get("iter", 0))
        )
        if is_numbered and isinstance(row.get("mode", ""), str):
            rows.append(row)
        else:
            unreadable += 1
    if unreadable:
        files.notes.append(f"{unreadable} lines of {SCALARS} cannot be read")
    return rows


def _add_evaluations(rows: list[dict[str, Any]], files: ForeignFiles) -> list[dict[str, Any]]:
    """Return the rows with those validations of followers that the run has not logged itself."""
    logged = {row.get("iter") for row in rows if row.get("mode") == "val"}
    found = [
        {**entry["metrics"], **{name: entry[name] for name in ("iter", "epoch", "mode")}}
        for entry in read_evaluations(files)
        if entry["mode"] == "val" and entry["iter"] not in logged
    ]
    if not found:
        return rows
    added = [*rows, *({**row, "step": row["iter"]} for row in found)]
    return sorted(added, key=lambda row: float(row.get("iter", row["step"])))


def _list_images(
    files: ForeignFiles, config: Mapping[str, Any]
) -> dict[str, list[tuple[int, pathlib.Path]]]:
    """Return the images in the directories to which the config's backends write them."""
    vis_dir = files.root / "vis_data"
    backends = get_dict(config, "visualizer").get("vis_backends")
    listed = backends if isinstance(backends, list | tuple) else ()
    directories = [get_dict(backend).get("img_save_dir") for backend in listed]
    images: dict[str, list[tuple[int, pathlib.Path]]] = {}
    for root in dict.fromkeys(
        vis_dir / name for name in (_IMAGE_DIR, *directories) if isinstance(name, str)
    ):
        # does not follow links to directories
        for folder, _, names in os.walk(root) if files.find(root) else ():
            for path in (pathlib.Path(folder, name) for name in names if name.endswith(".png")):
                stem = path.relative_to(root).with_suffix("").as_posix()
                match = _STEP.fullmatch(stem)
                name, step = (match[1], int(match[2])) if match else (stem, 0)
                images.setdefault(name, []).append((step, path))
    return {name: sorted(found) for name, found in sorted(images.items())}


def suggest_path(path: Any) -> str:
    """Return a suggestion like `did_you_mean` for a `pathlib.Path`, or one on object storage,
    that does not exist.
    """
    names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(path.name, names).replace("'", f"'{path.parent}/", 1)
