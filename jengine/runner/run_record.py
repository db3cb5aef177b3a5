"""Write `run.json` to the log directory: what a report on a run requires in addition to its scalars."""

import math
import pathlib
import platform
import time
from collections.abc import Sequence
from typing import Any

import jax

from jengine.checkpoint.manifest import write_synced
from jengine.json_codec import decode, encode
from jengine.paths import flatten
from jengine.runner.runner_protocol import Runner
from jengine.runner.versions import describe_device, package_versions

FILE = "run.json"


def start_record(runner: Runner, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write the record of a run before training; a resumed run adds a session to its record.

    Args:
      runner: about to train.
      columns: headings of the table of parameter groups.
      rows: cells of the table.
    """
    from jengine import __version__

    if not runner.is_main_process:
        return
    leaves = flatten(runner.state.params).values()
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    devices = jax.devices()
    session = dict(
        started=_now(),
        status="training",
        first_iter=runner.iter,
        versions={"jengine": __version__, "python": platform.python_version(), **package_versions()},
        devices=f"{len(devices)} x {describe_device(devices[0])}",
        processes=runner.processes.count,
    )
    record = dict(
        experiment_name=runner.experiment_name,
        seed=runner.seed,
        max_iters=runner.max_iters if math.isfinite(runner.max_iters) else None,
        max_epochs=runner.max_epochs if runner.train_loop.by_epoch else None,
        epoch_length=runner.train_loop.epoch_length,
        model=dict(
            tensors=len(sizes),
            parameters=sum(sizes),
            bytes=sum(size * leaf.dtype.itemsize for size, leaf in zip(sizes, leaves, strict=True)),
        ),
        groups=dict(columns=list(columns), rows=[list(row) for row in rows]),
        sessions=[*_read(runner).get("sessions", []), session],
    )
    _write(runner, record)
    update_record(runner)


def update_record(runner: Runner, status: str | None = None) -> None:
    """Update the progress and the time by phase of the current session.

    Args:
      runner: in or after training; a run that only validates or tests has no record.
      status: the new status: 'finished', or why training stopped; None leaves it unchanged.
    """
    if runner.train_loop is None or not runner.is_main_process:
        return
    if record := _read(runner):
        seconds = {phase: round(value, 3) for phase, value in runner.phase_timer.report().items()}
        session = record["sessions"][-1]
        session.update(updated=_now(), iter=runner.iter, epoch=runner.epoch, seconds=seconds)
        session["status"] = status or session["status"]
        _write(runner, record)


def _read(runner: Runner) -> dict[str, Any]:
    """Return the record; {} if there is none, as before training and after the log directory was deleted."""
    try:
        return dict(decode(pathlib.Path(runner.log_dir, FILE).read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        runner.logger.warning(f"{FILE} could not be read: {error}")
        return {}


def _write(runner: Runner, record: dict[str, Any]) -> None:
    try:
        write_synced(pathlib.Path(runner.log_dir, FILE), encode(record, indent=1))
    except OSError as error:  # training does not depend on it
        runner.logger.warning(f"{FILE} could not be written: {error}")


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
