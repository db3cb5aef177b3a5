"""Tests of a training's weights, in the file `tests.json` of its log directory."""

import pathlib
import time
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from jengine.checkpoint.identity import TIMESTAMP
from jengine.config.json_codec import decode_object, encode
from jengine.config.storage import (
    StorageError,
    list_directory,
    read_bytes,
    storage_path,
    write_bytes,
)
from jengine.config.work_dir import EVALUATIONS, RECORD, SCORES
from jengine.extras.report.foreign_files import ForeignFiles, conform
from jengine.extras.report.run_metrics import TIMES
from jengine.hooks.runner_protocol import RunnerProtocol

TESTS = "tests.json"
_FORM: dict[str, Any] = {
    "tests": [{"checkpoint": str, "iter": float, "tested": str, "metrics": {str: float}}]
}

_SCORES: dict[str, Any] = {
    **dict.fromkeys(("checkpoint", "mode"), str),
    **dict.fromkeys(("iter", "epoch"), float),
    "metrics": {str: float},
}


def record_test(runner: RunnerProtocol, metrics: dict[str, Any]) -> None:
    """Add the metrics of a test to the log directory of the training that made its weights.

    A later test of the same checkpoint replaces an earlier one; the newest is the last. Nothing is
    written for weights without a training, and for one whose log directory is not there.
    """
    weights = runner.run.evaluated
    log_dirs: Sequence[PurePath] = [pathlib.Path(runner.log_dir)]
    if weights and weights.get("run") != runner.run.run_id:  # of another training
        name = str(weights.get("timestamp"))
        if not TIMESTAMP.fullmatch(name):  # it names a directory, and a checkpoint is data
            return
        path = storage_path("load_from", weights["path"])
        # with a `CheckpointHook.out_dir` the logs are in the work dir, and checkpoints that were
        # moved for a later run are one level below
        roots = [path.parent, path.parent.parent, storage_path("work_dir", runner.work_dir)]
        log_dirs = [root / name for root in roots]
    found = [log_dir for log_dir in log_dirs if RECORD in list_directory(log_dir)]
    if not found:
        return
    checkpoint = PurePath(weights.get("path", "")).name
    entry = {
        "checkpoint": checkpoint,
        "iter": weights.get("iter", runner.iter),
        "tested": time.strftime("%Y-%m-%d %H:%M:%S"),
        "metrics": metrics,
    }
    file = found[0] / TESTS
    try:
        exists = TESTS in list_directory(found[0])
        tests = decode_object(read_bytes(file))["tests"] if exists else []
        tests = [test for test in tests if test["checkpoint"] != checkpoint] + [entry]
        write_bytes(file, encode({"tests": tests}, for_logs=True, indent=1).encode())
    except (OSError, ValueError, TypeError, KeyError, StorageError) as error:
        runner.logger.warning(f"the test is not added to {file}: {error}")


def read_evaluations(files: ForeignFiles) -> list[dict[str, Any]]:
    """Return the scores of checkpoints that followers have evaluated, by iteration."""
    folder = files.root / EVALUATIONS
    found = []
    for name in list_directory(folder) if files.find(folder) else ():
        entry = conform(files.read_json(folder / name / SCORES), _SCORES, SCORES, [])
        if len(entry) == len(_SCORES) and entry["metrics"]:
            found.append(entry)
    return sorted(found, key=lambda entry: float(entry["iter"]))


def read_tests(files: ForeignFiles) -> list[dict[str, Any]]:
    """Return the tests of a training; earlier versions wrote only that of the run itself."""
    earlier = {"metrics": files.read_json(files.root / f"{files.root.name}.json")}
    stored = conform(files.read_json(files.root / TESTS), _FORM, TESTS, [])
    found = []
    tests = stored.get("tests") or [conform(earlier, _FORM["tests"][0], TESTS, [])]
    followed = [entry for entry in read_evaluations(files) if entry["mode"] == "test"]
    for test in [*tests, *followed]:
        metrics = {name: x for name, x in test.get("metrics", {}).items() if name not in TIMES}
        if metrics:
            found.append({"checkpoint": "", **test, "metrics": metrics})
    return found
