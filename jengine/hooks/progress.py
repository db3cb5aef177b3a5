"""Show a progress bar with the remaining time, for a terminal."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS
from jengine.train.scanned_step import ChunkMetrics

_REDRAW_SECONDS = 0.1


@HOOKS.register_module()
class ProgressHook(Hook):
    """Show the progress of training and the remaining time, below the log lines.

    The command line adds it when the output is a TTY. The bar is redrawn at most ten times a second.

    Args:
      clock: returns the time in seconds.
    """

    priority = "LOWEST"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_redraw = 0.0
        self._progress: Any = None
        self._task: Any = None

    def before_train(self, runner: Runner) -> None:
        """Draw the bar."""
        from rich import progress

        from jengine.logging import terminal

        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("eta"),
            progress.TimeRemainingColumn(),
            console=terminal,
            transient=True,
        )
        self._progress.start()
        total = runner.max_iters if math.isfinite(runner.max_iters) else None
        self._task = self._progress.add_task("training", total=total, completed=runner.iter)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Update the bar."""
        now = self._clock()
        if now >= self._next_redraw or self.is_last_train_iter(runner):
            self._next_redraw = now + _REDRAW_SECONDS
            self._progress.update(self._task, completed=runner.iter + 1)

    def after_train_chunk(self, runner: Runner, batch_idx: int, data_batch: Any, metrics: ChunkMetrics) -> None:
        """Update the bar."""
        self.after_train_iter(runner, batch_idx)

    def after_train(self, runner: Runner) -> None:
        """Remove the bar."""
        self.close()

    def close(self) -> None:
        """Restore the terminal; call this if training ends without `after_train`."""
        if self._progress is not None:
            self._progress.stop()
