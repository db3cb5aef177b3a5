"""Writers for PeriodicLogger: terminal, JSON lines file and TensorBoard."""

import datetime
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TextIO

import jax
import numpy as np

from jengine.config.registry import VISBACKENDS, Registry
from jengine.extras.imix.log_buffer import Bins, Image, Result, to_uint8
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.history import HistoryBuffer

WRITERS: Registry = Registry("writer", section="WRITERS")

_PREFIX = "train/"
# metrics whose latest value is written
_UNSMOOTHED = frozenset({"lr", "loss_scale", "skipped_steps"})
_ETA_WINDOW = 1000


class LogBufferWriter:
    """Base class for writers, which read the run's metrics from the trainer's message hub.

    Attributes:
      writes_events: whether the writer defines `write_events`.
    """

    writes_events: ClassVar[bool] = False

    def begin(self, trainer: RunnerProtocol) -> None:
        """Prepare for training from `trainer.iter`."""

    def write(self, trainer: RunnerProtocol) -> None:
        """Write the current metrics."""
        raise NotImplementedError(f"{type(self).__name__} must define `write(trainer)`")

    def write_events(
        self, results: Sequence[Result], images: Sequence[Image], histograms: Sequence[Bins]
    ) -> None:
        """Write the validation results, images and histograms since the last call."""

    def close(self) -> None:
        """Close open files. Closing twice has no effect."""


def get_histories(trainer: RunnerProtocol) -> dict[str, HistoryBuffer]:
    """Return the training metric histories by name.

    The sum of the losses is `total_loss`, as in iMIX.
    """
    histories = trainer.message_hub.log_scalars.items()
    names = {f"{_PREFIX}loss": "total_loss"}
    return {
        names.get(key, key.removeprefix(_PREFIX)): x
        for key, x in histories
        if key.startswith(_PREFIX) and key != f"{_PREFIX}time"  # iMIX has `iter_time`
    }


def smooth_metrics(trainer: RunnerProtocol, window_size: int) -> dict[str, float]:
    """Return the median of the latest `window_size` values of each training metric, or the
    latest value for `lr`.
    """
    return {
        name: history.current() if name in _UNSMOOTHED else median(history, window_size)
        for name, history in get_histories(trainer).items()
    }


def median(history: HistoryBuffer, window_size: int) -> float:
    """Return the median of the latest `window_size` values, without those that are not finite
    unless all are.
    """
    history.keep(window_size)
    values = history.data[0][-window_size:]
    finite = values[np.isfinite(values)]
    return statistics.median((finite if finite.size else values).tolist())


@WRITERS.register_module()
class CommonMetricLoggerHook(LogBufferWriter):
    """Writer of log lines with the progress, losses, learning rate, times, memory, and remaining
    time.

    Args:
      max_iter: iterations in the whole run; by default the Runner's.
      max_epoch: epochs in the whole run; by default the Runner's.
      clock: function that returns the time in seconds, for an estimate without an
        IterationTimerHook.
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

    def write(self, trainer: RunnerProtocol) -> None:
        """Log the line."""
        histories = get_histories(trainer)
        max_iter = self.max_iter or trainer.max_iters
        parts = []
        if trainer.train_loop.by_epoch:
            loop = trainer.train_loop
            parts += [
                f"epoch:{trainer.epoch}",
                f"{trainer.iter - loop.epoch_start + 1}/{loop.epoch_length}",
            ]
        parts += [f"current_iter:{trainer.iter + 1}", f"max_iter:{max_iter}"]
        if trainer.train_loop.by_epoch:
            parts += [f"max_epoch:{self.max_epoch or trainer.max_epochs}"]
        losses = [
            f"{name}: {history.current():.3f}"
            for name, history in histories.items()
            # The scale of mixed precision is no loss, in spite of its name.
            if "loss" in name and name != "loss_scale"
        ]
        parts += ["  ".join(losses)]
        if "lr" in histories:
            parts += [f"lr:{histories['lr'].current():.6e}"]
        if "data_time" in histories:
            parts += [f"load_data_time:{histories['data_time'].mean(20):.4f}"]
        if "iter_time" in histories:
            parts += [f"iter_time:{histories['iter_time'].mean():.4f}"]
        if (memory := _get_peak_memory()) is not None:
            parts += [f"max used memory:{memory / 2**20:.0f}M"]
        if (
            eta := self._estimate_eta(histories, trainer.iter, max_iter)
        ) is not None and math.isfinite(eta):
            parts += [f"eta:{datetime.timedelta(seconds=int(eta))}"]
        trainer.logger.info(" \t ".join(parts))

    def _estimate_eta(
        self, histories: dict[str, HistoryBuffer], iteration: int, max_iter: float
    ) -> float | None:
        """Return the remaining seconds, from the median iteration time, or else the time since
        the last line.
        """
        if "iter_time" in histories:
            return median(histories["iter_time"], _ETA_WINDOW) * (max_iter - iteration)
        last = self._last
        self._last = (iteration, self._clock())
        if last is None or last[0] >= iteration:
            return None
        return (self._last[1] - last[1]) / (iteration - last[0]) * (max_iter - iteration)


class JsonLines:
    """Writer for a JSON lines file, which is opened for the first line: a run that is refused does
    not touch it.

    Args:
      path: the file; its directory is created if necessary.
      key: entry with the iteration in each line.
      start: first iteration of the run. Lines of this and later iterations, which the run will
        write again, are removed, as well as incomplete lines.
    """

    def __init__(self, path: str | os.PathLike[str], key: str, start: int) -> None:
        self._path = pathlib.Path(path)
        self._key = key
        self._start = start
        self._file: TextIO | None = None

    def write(self, values: Mapping[str, Any]) -> None:
        """Append a JSON object with sorted keys, and flush it to the disk."""
        if self._file is None:
            self._file = self._open()
        # JSON has neither NaN nor infinity: they become strings that `float()` can parse, 'nan' as
        # in iMIX.
        plain = {
            k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        self._file.write(json.dumps(plain, sort_keys=True, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # the line survives a crash of the machine

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if self._start > 0 and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    iteration = json.loads(line).get(self._key, 0)
                except json.JSONDecodeError:
                    continue
                if iteration < self._start:
                    kept.append(f"{line}\n")
        temporary = self._path.with_name(f"{self._path.name}.new")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self._path)  # atomic: the old lines are never half written
        return self._path.open("a", encoding="utf-8")


@WRITERS.register_module()
class JSONLoggerHook(LogBufferWriter):
    """Writer of JSON lines with sorted keys, each flushed to the disk.

    A line has `iteration`, counted from 0, with epochs also `epoch` and `inner-iteration`, and the
    training metrics: medians over the latest `window_size` values, but the latest learning rate.
    JSON has no NaN and no infinity: they are strings that `float()` can parse. A new run overwrites
    the file; a resumed run continues it where it starts.

    Args:
      json_file: the file; `training_status.json` in the work dir by default.
      window_size: number of values for the median.
    """

    def __init__(
        self, json_file: str | os.PathLike[str] | None = None, window_size: int = 20
    ) -> None:
        self.json_file = json_file
        self.window_size = window_size
        self._file: JsonLines | None = None

    def begin(self, trainer: RunnerProtocol) -> None:
        """Open the file, and drop the lines that the run will write again."""
        self.close()
        self._file = JsonLines(
            self.json_file or os.path.join(trainer.local_dir, "training_status.json"),
            "iteration",
            trainer.iter,
        )

    def write(self, trainer: RunnerProtocol) -> None:
        """Append the line."""
        if self._file is None:
            raise RuntimeError("JSONLoggerHook: `begin` must be called before `write`")
        line: dict[str, Any] = {"iteration": trainer.iter}
        if trainer.train_loop.by_epoch:
            inner = trainer.iter - trainer.train_loop.epoch_start
            line |= {"epoch": trainer.epoch, "inner-iteration": inner}
        self._file.write({**line, **smooth_metrics(trainer, self.window_size)})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


@WRITERS.register_module()
class TensorboardLoggerHook(LogBufferWriter):
    """Writer of training metrics, EvaluateHook results, images and histograms to a TensorBoard
    event file.

    Steps are iterations, counted from 0. Result names start with `val/`.

    Args:
      log_dir: parent of the directory `runs` for the event file; the work dir by default.
      window_size: number of values for the medians.
    """

    extra = "tensorboard"
    writes_events = True

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, window_size: int = 20
    ) -> None:
        self.log_dir = log_dir
        self.window_size = window_size
        self._backend: Any = None

    def begin(self, trainer: RunnerProtocol) -> None:
        """Create the event file.

        TensorBoard discards earlier values for iterations that the run repeats.
        """
        backend = VISBACKENDS.get("TensorboardVisBackend")
        self._backend = backend(os.path.join(self.log_dir or trainer.local_dir, "runs"))
        if trainer.iter > 0:
            # TensorBoard drops later events of the earlier run
            self._backend.load_state_dict({}, trainer.iter - 1)

    def write(self, trainer: RunnerProtocol) -> None:
        """Write the training metrics."""
        if self._backend is None:
            raise RuntimeError("TensorboardLoggerHook: `begin` must be called before `write`")
        self._backend.add_scalars(smooth_metrics(trainer, self.window_size), step=trainer.iter)

    def write_events(
        self, results: Sequence[Result], images: Sequence[Image], histograms: Sequence[Bins]
    ) -> None:
        """Write each event at its own iteration."""
        from jengine.logging.convert import Histogram

        for result in results:
            scalars = self._backend.name_scalars({**result.metrics, "mode": "val"})
            self._backend.add_scalars(scalars, result.step)
        for image in images:
            self._backend.add_image(image.name, to_uint8(image.data), image.step)
        for bins in histograms:
            name, counts, edges, mean, std, step = bins
            self._backend.add_histogram(
                name, Histogram(counts, edges, float(mean), float(std)), step
            )

    def close(self) -> None:
        """Close the event file."""
        if self._backend is not None:
            self._backend.close()


def _get_peak_memory() -> int | None:
    """Return the first device's peak memory in bytes.

    None if the backend does not report it, as on a CPU.
    """
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")
