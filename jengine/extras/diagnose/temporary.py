"""Runners of commands that leave no files."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from jengine.runner.runner import Runner


@contextlib.contextmanager
def temporary_runner(cfg: Mapping[str, Any]) -> Iterator[Any]:
    """Build a Runner in a temporary directory, so that the command leaves no files behind, and
    logs only warnings.
    """
    with tempfile.TemporaryDirectory() as work_dir:
        yield Runner.from_cfg(
            {**cfg, "work_dir": work_dir, "log_level": "WARNING", "resume": False}
        )
