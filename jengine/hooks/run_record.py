"""Record of a run, the file `run.json` in its log directory: what it is, and the progress and
times of each session.
"""

import math
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from jengine.config.json_codec import decode_object, encode
from jengine.config.storage import read_bytes, write_bytes
from jengine.config.work_dir import RECORD
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.train.state import count_parameters
from jengine.versions import __version__, describe_device, environment_versions

GroupTable = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The columns and rows of a table with parameter groups."""

_lock = threading.Lock()  # the thread that writes log lines updates the progress


def start_record(runner: RunnerProtocol, groups: GroupTable) -> None:
    """Write the record before training; a resumed run adds a session to it."""
    if not runner.is_main_process:
        return
    tensors, parameters, size = count_parameters(runner.state.params)
    devices = jax.devices()
    session = dict(
        started=_now(),
        status="training",
        first_iter=runner.iter,
        versions={"jengine": __version__, **environment_versions()},
        devices=f"{len(devices)} x {describe_device(devices[0])}",
        processes=jax.process_count(),
    )
    columns, rows = groups
    record = dict(
        experiment_name=runner.experiment_name,
        seed=runner.seed,
        # JSON has no infinity
        max_iters=runner.max_iters if math.isfinite(runner.max_iters) else None,
        max_epochs=runner.max_epochs if runner.train_loop.by_epoch else None,
        epoch_length=runner.train_loop.epoch_length,
        model=dict(tensors=tensors, parameters=parameters, bytes=size),
        groups=dict(columns=list(columns), rows=[list(row) for row in rows]),
        sessions=[*read_sessions(runner), session],  # a resumed run has the same log directory
    )
    _write(runner, record)
    update_record(runner)


def update_record(
    runner: RunnerProtocol, status: str | None = None, background: bool = False
) -> None:
    """Update the progress, the time by phase and the status in the record.

    Args:
      runner: only a training has a record.
      status: 'finished', or why training stopped.
      background: let the thread that writes the log lines write the file.
    """
    if runner.train_loop is None or not runner.is_main_process:
        return
    # Read here, in the thread of the loop: the timer belongs to it.
    seconds = {phase: round(value, 3) for phase, value in runner.stopwatch.report().items()}
    progress = dict(updated=_now(), iter=runner.iter, epoch=runner.epoch, seconds=seconds)
    progress |= {} if status is None else {"status": status}
    if background:
        runner.log_writer.submit(_update, runner, progress)
    else:
        _update(runner, progress)


def read_sessions(runner: RunnerProtocol) -> list[dict[str, Any]]:
    """Return the sessions in the record; none before training, or in a deleted log directory."""
    return list(_read(runner).get("sessions", []))


def _update(runner: RunnerProtocol, progress: dict[str, Any]) -> None:
    with _lock:
        if record := _read(runner):
            session = record["sessions"][-1]
            if progress["iter"] >= session.get("iter", 0):  # a job in the background may be late
                session.update(progress)
                _write(runner, record)


def _read(runner: RunnerProtocol) -> dict[str, Any]:
    try:
        return dict(decode_object(read_bytes(pathlib.Path(runner.log_dir, RECORD))))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        runner.logger.warning(f"{RECORD} could not be read: {error}")
        return {}


def _write(runner: RunnerProtocol, record: dict[str, Any]) -> None:
    try:
        write_bytes(pathlib.Path(runner.log_dir, RECORD), encode(record, indent=1).encode())
    except OSError as error:  # training does not depend on it
        runner.logger.warning(f"{RECORD} could not be written: {error}")


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
