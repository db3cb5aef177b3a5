"""What PeriodicLogger writes to: the terminal, a file of JSON lines, TensorBoard."""

import datetime
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TextIO

import jax

from jengine.contrib.imix.json_lines import open_lines, write_line
from jengine.contrib.imix.log_buffer import Bins, Image, Result, as_pixels
from jengine.hooks.runner_protocol import Runner
from jengine.logging import HistoryBuffer
from jengine.registry import Registry

WRITERS = Registry("writer", "jengine.contrib.imix")

_PREFIX = "train/"
_TOTAL = "total_loss"  # what iMIX calls the sum of the losses
_UNSMOOTHED = frozenset({"lr", "loss_scale", "skipped_steps"})
_ETA_WINDOW = 1000


class LogBufferWriter:
    """Writes the numbers of a run, read from the trainer's message hub.

    Attributes:
      takes_more: whether it has a `write_more`.
    """

    takes_more: ClassVar[bool] = False

    def begin(self, trainer: Runner) -> None:
        """Training starts, at `trainer.iter`."""

    def write(self, trainer: Runner) -> None:
        """Writes what the current iteration stands at."""
        raise NotImplementedError(f"{type(self).__name__} must define `write(trainer)`")

    def write_more(self, results: Sequence[Result], images: Sequence[Image], histograms: Sequence[Bins]) -> None:
        """Writes what has come together since the last time: results of validations, images, histograms."""

    def close(self) -> None:
        """Finishes what is open. Closing twice is fine."""


def histories(trainer: Runner) -> dict[str, HistoryBuffer]:
    """The histories of training by name; the sum of the losses is `total_loss`."""
    found = {
        key.removeprefix(_PREFIX): history
        for key, history in trainer.message_hub.log_scalars.items()
        if key.startswith(_PREFIX)
    }
    return {_TOTAL if name == "loss" else name: history for name, history in found.items()}


def smoothed(trainer: Runner, window_size: int) -> dict[str, float]:
    """The numbers of training by name: the median of the newest `window_size`, of learning rates the newest."""
    return {
        name: history.current() if name in _UNSMOOTHED else median(history, window_size)
        for name, history in histories(trainer).items()
    }


def median(history: HistoryBuffer, window_size: int) -> float:
    """The median of the newest `window_size` values."""
    values = sorted(history.data[0][-window_size:].tolist())
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


@WRITERS.register_module()
class CommonMetricLoggerHook(LogBufferWriter):
    """Logs a line: where training stands, losses, learning rate, times, memory, and how long it will still take.

    Args:
      max_iter: iterations of the whole run; the run's own by default.
      max_epoch: epochs likewise.
      clock: gives the time in seconds, for an estimate where no IterationTimerHook times iterations.
    """

    def __init__(
        self,
        max_iter: int | None = None,
        max_epoch: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_iter = max_iter
        self.max_epoch = max_epoch
        self._clock = clock
        self._last: tuple[int, float] | None = None

    def write(self, trainer: Runner) -> None:
        """Logs the line."""
        found = histories(trainer)
        max_iter = self.max_iter or trainer.max_iters
        parts = []
        if trainer.train_loop.by_epoch:
            length = len(trainer.train_loop.dataloader)
            parts += [f"epoch:{trainer.epoch}", f"{trainer.iter - trainer.epoch * length + 1}/{length}"]
        parts += [f"current_iter:{trainer.iter + 1}", f"max_iter:{max_iter}"]
        if trainer.train_loop.by_epoch:
            parts += [f"max_epoch:{self.max_epoch or trainer.max_epochs}"]
        losses = [f"{name}: {h.current():.3f}" for name, h in found.items() if "loss" in name and name != "loss_scale"]
        parts += ["  ".join(losses)]
        if "lr" in found:
            parts += [f"lr:{found['lr'].current():.6e}"]
        if "data_time" in found:
            parts += [f"load_data_time:{found['data_time'].mean(20):.4f}"]
        if "iter_time" in found:
            parts += [f"iter_time:{found['iter_time'].mean():.4f}"]
        if (memory := _peak_memory()) is not None:
            parts += [f"max used memory:{memory / 2**20:.0f}M"]
        if (eta := self._eta(found, trainer.iter, max_iter)) is not None:
            parts += [f"eta:{datetime.timedelta(seconds=int(eta))}"]
        trainer.logger.info(" \t ".join(parts))

    def _eta(self, found: dict[str, HistoryBuffer], iteration: int, max_iter: int) -> float | None:
        """Seconds to the end: from the median time of an iteration, else from the clock since the last line."""
        if "iter_time" in found:
            return median(found["iter_time"], _ETA_WINDOW) * (max_iter - iteration)
        last, self._last = self._last, (iteration, self._clock())
        if last is None or last[0] >= iteration:
            return None
        return (self._last[1] - last[1]) / (iteration - last[0]) * (max_iter - iteration)


@WRITERS.register_module()
class JSONLoggerHook(LogBufferWriter):
    """Appends one JSON object per line, its keys sorted, each on the disk when the call returns.

    A line has `iteration`, counted from 0, with epochs also `epoch` and `inner-iteration`, and the numbers of training:
    the median over the window, of the learning rate the newest. JSON has no NaN and no infinity: they are strings that
    `float()` reads. A run that starts anew begins the file anew, one that is resumed goes on with it from
    the iteration that it goes on with.

    Args:
      json_file: the file; `training_status.json` in the work dir by default.
      window_size: iterations in the window.
    """

    def __init__(self, json_file: str | os.PathLike[str] | None = None, window_size: int = 20) -> None:
        self.json_file = json_file
        self.window_size = window_size
        self._file: TextIO | None = None

    def begin(self, trainer: Runner) -> None:
        """Opens the file, without the lines of iterations that are done again."""
        self.close()
        self._file = open_lines(
            self.json_file or os.path.join(trainer.work_dir, "training_status.json"), "iteration", trainer.iter
        )

    def write(self, trainer: Runner) -> None:
        """Appends the line."""
        row: dict[str, Any] = {"iteration": trainer.iter}
        if trainer.train_loop.by_epoch:
            inner = trainer.iter - trainer.epoch * len(trainer.train_loop.dataloader)
            row |= {"epoch": trainer.epoch, "inner-iteration": inner}
        if self._file is None:
            raise RuntimeError("JSONLoggerHook: `begin` comes before `write`")
        write_line(self._file, {**row, **smoothed(trainer, self.window_size)})

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


@WRITERS.register_module()
class TensorboardLoggerHook(LogBufferWriter):
    """Writes all that there is to a TensorBoard event file, at its iteration, counted from 0.

    That is the numbers of training, the results of EvaluateHook, and the images and histograms that hooks put.

    Args:
      log_dir: the event file lies in `runs` below it; the work dir by default.
      window_size: iterations in the window of the median.
    """

    takes_more = True

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, window_size: int = 20) -> None:
        self.log_dir = log_dir
        self.window_size = window_size
        self._backend: Any = None

    def begin(self, trainer: Runner) -> None:
        """Names the event file; TensorBoard forgets what an earlier one holds of iterations that are done again."""
        from jengine.visualization import TensorboardVisBackend

        self._backend = TensorboardVisBackend(os.path.join(self.log_dir or trainer.work_dir, "runs"))
        if trainer.iter > 0:
            self._backend.load_state_dict({}, trainer.iter - 1)

    def write(self, trainer: Runner) -> None:
        """Writes the numbers."""
        if self._backend is None:
            raise RuntimeError("TensorboardLoggerHook: `begin` comes before `write`")
        self._backend.add_scalars(smoothed(trainer, self.window_size), step=trainer.iter)

    def write_more(self, results: Sequence[Result], images: Sequence[Image], histograms: Sequence[Bins]) -> None:
        """Writes them, each at its own iteration."""
        from jengine.visualization.convert import Histogram

        for result in results:
            self._backend.add_scalars(result.metrics, result.step)
        for image in images:
            self._backend.add_image(image.name, as_pixels(image.data), image.step)
        for bins in histograms:
            histogram = Histogram(bins.counts, bins.edges, float(bins.mean), float(bins.std))
            self._backend.add_histogram(bins.name, histogram, bins.step)

    def close(self) -> None:
        """Closes the event file."""
        if self._backend is not None:
            self._backend.close()


def _peak_memory() -> int | None:
    """The most bytes that the first device has had in use; None where it does not say, as on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")
