"""Progress bar with the remaining time, for a terminal or a notebook."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.extras.report.notebook import NotebookProgress
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging import console
from jengine.logging.console import in_notebook, terminal_handlers

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 60.0


class _TerminalProgress:
    """Bar below the log lines of a terminal, which disappears at the end."""

    def __init__(self, total: int | None, completed: int) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("eta"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[loss]}"),
            console=console.terminal,
            transient=True,  # only the log lines stay
        )
        self._task = self._bar.add_task("training", total=total, completed=completed, loss="")

    def start(self) -> None:
        self._bar.start()

    def add_loss(self, iteration: int, loss: float) -> None:
        self._bar.update(self._task, loss=f"loss: {loss:.4f}")

    def update(self, completed: int) -> None:
        self._bar.update(self._task, completed=completed)

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone, with a SIGHUP
            self._bar.stop()


@HOOKS.register_module()
class ProgressHook(Hook):
    """Progress bar with the remaining time and the loss of the newest training line.

    In a notebook with a plot of it.

    The command line adds it when the output is a TTY; in a notebook it is a default hook,
    `progress`. The bar is redrawn at most ten times a second, and one training line a minute is
    shown; the log file has all lines.

    Args:
      clock: returns the time in seconds.
    """

    priority = "LOWEST"
    acts_on = "metrics"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_redraw = 0.0
        self._bar: _TerminalProgress | NotebookProgress | None = None
        self._last_line = clock()  # when the terminal showed a training line
        self._logger: logging.Logger | None = None

    def before_train(self, runner: RunnerProtocol) -> None:
        """Draw the bar."""
        total = int(runner.max_iters) if math.isfinite(runner.max_iters) else None
        kind = NotebookProgress if in_notebook() else _TerminalProgress
        self._bar = kind(total, runner.iter)
        self._bar.start()
        self._last_line = self._clock()
        self._logger = runner.logger
        self._logger.addFilter(self._show_loss)
        for handler in terminal_handlers(self._logger):  # not the logger: its file has all lines
            handler.addFilter(self._is_due)

    def _show_loss(self, record: logging.LogRecord) -> bool:
        """Show the loss of a training line in the bar; pass every record on."""
        scalars: Mapping[str, Any] = getattr(record, "periodic", None) or {}
        losses = [value for name, value in scalars.items() if name.split("/")[-1] == "loss"]
        bar = self._bar  # this thread writes the log; the other one may remove the bar
        if losses and bar is not None:
            bar.add_loss(scalars.get("iter", 0), losses[0])
        return True

    def _is_due(self, record: logging.LogRecord) -> bool:
        """Return whether the terminal should show a record: one training line a minute, and all
        other lines.
        """
        if getattr(record, "periodic", None) is None:
            return True
        if self._clock() - self._last_line < _LINE_SECONDS:
            return False
        self._last_line = self._clock()
        return True

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Update the bar."""
        now = self._clock()
        if self._bar is not None and (now >= self._next_redraw or self.is_last_train_iter(runner)):
            self._next_redraw = now + _REDRAW_SECONDS
            self._bar.update(runner.iter + 1)

    def after_train(self, runner: RunnerProtocol) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._logger is not None:
            # The logger outlives the run: its next run must not be filtered by this bar.
            self._logger.removeFilter(self._show_loss)
            for handler in terminal_handlers(self._logger):
                handler.removeFilter(self._is_due)
            self._logger = None

    on_failure = after_train  # before the lines about an error or a signal
