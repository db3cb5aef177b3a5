"""Show a progress bar with the remaining time, for a terminal."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS
from jengine.train.scanned_step import ChunkMetrics

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 60.0


@HOOKS.register_module()
class ProgressHook(Hook):
    """Show the progress of training and the remaining time, below the log lines.

    The command line adds it when the output is a TTY. The bar is redrawn at most ten times a second; it has the loss of
    the newest log line of training, of which the terminal shows at most one a minute. The log file has all of them.

    Args:
      clock: returns the time in seconds.
    """

    priority = "LOWEST"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_redraw = 0.0
        self._progress: Any = None
        self._task: Any = None
        self._filter = _PeriodicLines(clock)
        self._handlers: list[logging.Handler] = []
        self._show_losses = _LossHandler(self._show)
        self._logger: logging.Logger | None = None

    def before_train(self, runner: Runner) -> None:
        """Draw the bar."""
        from rich import progress

        from jengine.logging import terminal, terminal_handlers

        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("eta"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[loss]}"),
            console=terminal,
            transient=True,
        )
        self._progress.start()
        total = runner.max_iters if math.isfinite(runner.max_iters) else None
        self._task = self._progress.add_task("training", total=total, completed=runner.iter, loss="")
        self._filter = _PeriodicLines(self._clock)
        self._handlers = terminal_handlers(runner.logger)
        for handler in self._handlers:
            handler.addFilter(self._filter)
        self._logger = runner.logger
        self._logger.addHandler(self._show_losses)

    def _show(self, scalars: Mapping[str, Any]) -> None:
        """Show the loss of a log line in the bar."""
        losses = [value for name, value in scalars.items() if name.split("/")[-1] == "loss"]
        if losses:
            self._progress.update(self._task, loss=f"loss: {losses[0]:.4f}")

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Outputs = None) -> None:
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

    def on_failure(self, runner: Runner) -> None:
        """Remove the bar before the lines about an error or a signal."""
        self.close()

    def close(self) -> None:
        """Restore the terminal; call this if training fails before its first iteration."""
        if self._progress is not None:
            with contextlib.suppress(OSError):  # the terminal may be gone, with a SIGHUP
                self._progress.stop()
        for handler in self._handlers:
            handler.removeFilter(self._filter)
        self._handlers = []
        if self._logger is not None:
            self._logger.removeHandler(self._show_losses)
            self._logger = None


class _LossHandler(logging.Handler):
    """Pass the scalars of each periodic log line to `show`."""

    def __init__(self, show: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Show the scalars of a periodic line."""
        if (scalars := getattr(record, "periodic", None)) is not None:
            self._show(scalars)


class _PeriodicLines(logging.Filter):
    """Pass one periodic log line a minute, and all other lines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._last = clock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to print the record."""
        if getattr(record, "periodic", None) is None:
            return True
        if self._clock() - self._last < _LINE_SECONDS:
            return False
        self._last = self._clock()
        return True
