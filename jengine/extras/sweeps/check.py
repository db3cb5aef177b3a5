"""List and check the runs of a sweep in a process of its own, so that the sweep itself takes no
device.
"""

import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jengine.config.errors import ConfigError
from jengine.extras.sweeps.space import Setting, ValueRange


class Request(NamedTuple):
    """What a sweep runs, as the user wrote it; the arguments of `jengine.sweep`."""

    config: str  # path
    overrides: Sequence[str]  # for all runs
    grid: Mapping[str, Sequence[Any]]
    ranges: Mapping[str, ValueRange]
    draws: int
    search: bool
    seeds: Sequence[int]
    metric: str | None


class Plan(NamedTuple):
    """Checked runs of a sweep."""

    settings: list[Setting]  # of a search: only examples, which were checked
    grid: dict[str, list[Any]]  # with complete paths
    ranges: dict[str, ValueRange]  # with complete paths
    metric: str  # the main metric; '' if unknown
    rule: str  # 'greater' or 'less'; '' if unknown
    fingerprint: str  # hash of the config without the settings


def add_pruning(metric: str, rule: str) -> list[str]:
    """Return the overrides that add Optuna's pruning to a run."""
    hook = "default_hooks.pruning"
    return [
        f"{hook}.type='OptunaPruningHook'",
        f"{hook}.monitor={metric!r}",
        f"{hook}.rule={rule!r}",
    ]


def check(request: Request) -> Plan:
    """List the runs, and check all configs, in a process of its own.

    Raises:
      ConfigError: a config is not valid; the message names the path and the run.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "plan.pickle")
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # a device belongs to a run
        command = [sys.executable, "-m", "jengine.extras.sweeps.sweep_check", str(path)]
        done = subprocess.run(command, input=pickle.dumps(request), env=environment)
        if not path.exists():
            raise ConfigError(
                "the configs could not be checked: the process ended with exit code "
                f"{done.returncode}"
            )
        plan: Plan | ConfigError = pickle.loads(path.read_bytes())
    if isinstance(plan, ConfigError):
        raise plan
    return plan
