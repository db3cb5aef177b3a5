"""Determine the identity of a run: its name, seed, directories and initial weights."""

import dataclasses
import datetime
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jengine.config import check_keys
from jengine.errors import config_path
from jengine.registry import check_arguments


@dataclasses.dataclass(frozen=True)
class LoadFrom:
    """Describe the weights that a run starts from.

    Attributes:
      path: the checkpoint.
      rename: `(old, new)` prefixes of parameter paths, for a model with other names.
      strict: False keeps the model's own values where the checkpoint has no matching ones.
      raw: True loads the raw parameters of a run that saved averages.
    """

    path: str
    rename: Sequence[tuple[str, str]] = ()
    strict: bool = True
    raw: bool = False


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identify a run. A resumed run has the name, seed and log directory of the run that it continues.

    Attributes:
      work_dir: absolute path of the directory of checkpoints.
      log_dir: `<work_dir>/<timestamp>`, the directory of logs.
      timestamp: start time of the run, `20250131_235959`.
      experiment_name: name of the run in its logs.
      seed: seed of its random numbers.
      load_from: the weights that it starts from; None for random ones.
      resume_from: the checkpoint that it continues; None for none.
    """

    work_dir: str
    log_dir: str
    timestamp: str
    experiment_name: str
    seed: int
    load_from: LoadFrom | None
    resume_from: str | None


def identify(
    work_dir: Any,
    load_from: Any = None,
    resume: Any = False,
    randomness: Mapping[str, Any] | None = None,
    experiment_name: str | None = None,
) -> Identity:
    """Determine the identity of a run, without writing anything. The arguments are those of the Runner.

    Raises:
      FileNotFoundError: a named checkpoint does not exist. ConfigError: an unknown key in `randomness`.
    """
    from jengine import checkpoint

    work_dir = os.path.abspath(os.fspath(work_dir))
    resume_path = None
    if resume is True:
        resume_path = checkpoint.find_latest(work_dir)
    elif resume:
        with config_path("resume"):
            resume_path = str(checkpoint.resolve(resume))
    earlier = checkpoint.read_meta(resume_path)["meta"] if resume_path is not None else {}

    timestamp = earlier.get("timestamp") or _new_timestamp(work_dir)
    fresh_name = f"{experiment_name}_{timestamp}" if experiment_name else timestamp
    return Identity(
        work_dir=work_dir,
        log_dir=os.path.join(work_dir, timestamp),
        timestamp=timestamp,
        experiment_name=earlier.get("experiment_name", fresh_name),
        seed=_choose_seed(randomness, earlier.get("seed")),
        load_from=_parse_load_from(load_from),
        resume_from=resume_path,
    )


def _parse_load_from(load_from: Any) -> LoadFrom | None:
    """Return the weights to start from, given as a path or as a dict of `LoadFrom`'s fields."""
    from jengine import checkpoint

    if load_from is None:
        return None
    with config_path("load_from"):
        options = dict(load_from.items()) if hasattr(load_from, "items") else {"path": load_from}
        if "path" in options:
            options["path"] = str(checkpoint.resolve(options["path"]))
        check_arguments(LoadFrom, options)
        return LoadFrom(**options)


def _new_timestamp(work_dir: str) -> str:
    """Return the local time, with a number if an earlier run started in the same second."""
    timestamp = name = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    number = 1
    while os.path.exists(os.path.join(work_dir, name)):
        name, number = f"{timestamp}_{number}", number + 1
    return name


def _choose_seed(randomness: Mapping[str, Any] | None, earlier: int | None) -> int:
    with config_path("randomness"):
        check_keys(dict(randomness or {}), ["seed"])
    if earlier is not None:
        return earlier
    seed = (randomness or {"seed": 0}).get("seed")
    return int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else int(seed)


def move_earlier_checkpoints(work_dir: str) -> str | None:
    """Move the checkpoints of an earlier run to `<work_dir>/earlier_<n>`, before a run starts from scratch.

    Returns:
      Their new directory; None if there are no checkpoints.
    """
    from jengine.checkpoint import list_checkpoints

    checkpoints = list_checkpoints(work_dir)
    if not checkpoints:
        return None
    number = 1
    while os.path.exists(target := os.path.join(work_dir, f"earlier_{number}")):
        number += 1
    os.makedirs(target)
    for path in checkpoints:
        shutil.move(path, os.path.join(target, os.path.basename(path)))
    pointer = os.path.join(work_dir, "last_checkpoint")
    if os.path.exists(pointer):
        os.remove(pointer)
    return target
