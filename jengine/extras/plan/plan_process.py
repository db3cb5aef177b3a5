"""Processes that run `plan_worker` with the environment for XLA's compilers, and what they
return.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jengine.config.errors import ConfigError
from jengine.extras.plan.topologies import Topology

_SHOWN_LINES = 20


class PlanError(ConfigError):
    """Error for a config that could not be compiled."""


def compile_candidates(
    config: str,
    overrides: Sequence[str],
    topology: Topology,
    candidates: Sequence[Mapping[str, Any]],
    processes: int | None = None,
    training_only: bool = False,
) -> Iterator[dict[str, Any]]:
    """Compile a config for chips, with some values replaced, and yield a result for each candidate.

    Args:
      config, overrides: as on the command line, for all candidates.
      topology: the chips.
      candidates: `mesh`, see `build_mesh`, or None for the config's own; and further `overrides`.
      processes: number of processes that read `batch_size` examples each; None for one on each
        host.
      training_only: see `compile_plan`.

    Yields:
      `plan` with `warnings`, or `error` with `traceback`, all as text. A compiler crash ends one
      candidate.
    """
    request = {
        "config": config,
        "overrides": list(overrides),
        "topology": topology.slice_name,
        "slices": topology.slices,
        "processes": processes,
        "training_only": training_only,
    }
    # one process compiles as many as it can: its start takes longer than most compiles
    left = list(candidates)
    while left:
        results, crash = _run_worker({**request, "candidates": left}, topology.environment)
        yield from results
        left = left[len(results) :]
        if left:
            yield {"error": crash, "traceback": ""}
            left = left[1:]  # the candidate that crashed the compiler


def _run_worker(
    request: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """Return the candidates' results, and the end of the output from a process that did not
    finish them.
    """
    # Results in a file, line by line: what was compiled before a crash is kept, and stdout is free
    # for messages.
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "results")
        command = [
            sys.executable,
            "-m",
            "jengine.extras.plan.plan_worker",
            json.dumps(request),
            path,
        ]
        process = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **environment}
        )
        results = []
        if os.path.exists(path):
            with open(path) as file:
                results = [json.loads(line) for line in file]
    lines = [line for line in process.stderr.splitlines() if "cuda drivers" not in line]
    # XLA names the cause there; a stack trace without symbols follows.
    failed = [line for line in lines if "Check failed" in line] or lines[-_SHOWN_LINES:]
    return results, "\n".join([f"the compiler ended with exit code {process.returncode}", *failed])
