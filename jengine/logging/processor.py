"""Format the histories of the message hub as a log line and as the tag of the visualization backends."""

import datetime
import functools
import re
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Literal, Protocol

import jax
import numpy as np

from jengine.annotations import Count, Index, checked
from jengine.errors import config_path
from jengine.logging.history import HistoryBuffer
from jengine.logging.message_hub import HubSnapshot, MessageHub
from jengine.registry import LOG_PROCESSORS, check_arguments

Mode = Literal["train", "val", "test"]

_BYTES_PER_MB = 1024**2


class LoggedLoop(Protocol):
    """Describe the loop that a log line is about."""

    @property
    def dataloader(self) -> Sized:
        """Return the batches of one pass."""


class LoggedRun(Protocol):
    """Describe the part of the Runner that log lines need."""

    @property
    def iter(self) -> int:
        """Return the number of completed training iterations."""

    @property
    def epoch(self) -> int:
        """Return the number of completed epochs."""

    @property
    def max_iters(self) -> int:
        """Return the number of training iterations of the whole run."""

    @property
    def max_epochs(self) -> int:
        """Return the number of epochs of the whole run."""

    @property
    def message_hub(self) -> MessageHub | HubSnapshot:
        """Return the histories of scalars."""

    @property
    def train_loop(self) -> LoggedLoop | Any:
        """Return the training loop; None in runs that do not train."""

    @property
    def val_loop(self) -> LoggedLoop | Any:
        """Return the validation loop; None in runs that do not validate."""

    @property
    def test_loop(self) -> LoggedLoop | Any:
        """Return the test loop; None in runs that do not test."""


@LOG_PROCESSORS.register_module()
class LogProcessor:
    """Choose the statistic of each scalar and format them, in the line format of MMEngine.

    A scalar whose name matches `mean_pattern` is shown as its mean over the newest `window_size` values, any other as
    its current value. `custom_cfg` adds statistics or replaces them.

    Args:
      window_size: number of values in a mean.
      by_epoch: headers count epochs, `Epoch(train) [1][2/4]`; False: `Iter(train) [2/40]`.
      custom_cfg: list of `dict(data_src, method_name, window_size, log_name)`: the scalar (without its loop), the
        statistic, its window (an int, 'epoch' or 'global'), and the name of the result (default: `data_src`, whose
        own statistic it then replaces). Further keys go to the statistic.
      num_digits: digits after the point.
      log_with_hierarchy: the tag keeps the loop in its names: 'train/loss'.
      mean_pattern: regular expression, searched in the name without its loop.

    Raises:
      AssertionError: two entries of `custom_cfg` with the same result name, an entry without `data_src`, or the
        window 'epoch' with `by_epoch=False`.
      KeyError: an entry without a known `method_name`, or without `window_size` while `by_epoch=False`.
      TypeError: a window that is not an int, 'epoch' or 'global'; an argument that the statistic does not have.
      ValueError: a window below 1.
    """

    def __init__(
        self,
        window_size: Count = 10,
        by_epoch: bool = True,
        custom_cfg: Sequence[Mapping[str, Any]] | None = None,
        num_digits: Index = 4,
        log_with_hierarchy: bool = False,
        mean_pattern: str = r".*(loss|time|data_time|grad_norm).*",
    ) -> None:
        self.window_size = window_size
        self.by_epoch = by_epoch
        self.custom_cfg = [dict(entry) for entry in custom_cfg or ()]
        self.num_digits = num_digits
        self.log_with_hierarchy = log_with_hierarchy
        self.mean_pattern = re.compile(mean_pattern)
        self._is_averaged = functools.cache(self.mean_pattern.search)
        _check_custom_cfg(self.custom_cfg, by_epoch)

    def get_log_after_iter(self, runner: LoggedRun, batch_idx: int, mode: Mode) -> tuple[dict[str, Any], str]:
        """Format the scalars of an iteration.

        Args:
          runner: the runner.
          batch_idx: index of the batch in its loop, from 0.
          mode: 'train', 'val' or 'test'.

        Returns:
          The tag (name -> number, with `epoch`, `iter` from 1 and `memory` where they apply) and the line.

        Raises:
          AssertionError: any other mode.
        """
        _check_mode(mode, ("train", "val", "test"))
        scalars = self._scalars(runner.message_hub, batch_idx, mode, self.custom_cfg)
        tag = self._named(scalars, mode)
        header = self._iter_header(runner, batch_idx, mode)
        if self.by_epoch and mode != "test":
            tag["epoch"] = _epoch(runner, mode)
        tag["iter"] = 0 if _untrained(runner) else runner.iter + 1

        rates = [f"{name}: {value:.{self.num_digits}e}" for name, value in scalars.items() if name.endswith("lr")]
        rest = {name: self._text(value) for name, value in scalars.items() if not name.endswith("lr")}
        line = header + " ".join(rates) + "  "
        eta = runner.message_hub.get_info("eta")
        if eta is not None and "time" in rest and "data_time" in rest:
            line += f"eta: {datetime.timedelta(seconds=int(eta))}  "
            line += f"time: {rest.pop('time')}  data_time: {rest.pop('data_time')}  "
        memory = self._peak_memory()
        if memory is not None:
            tag["memory"] = memory
            line += f"memory: {memory}  "
        if mode != "train":  # metrics are known at the end of the pass; the hub still holds those of the one before
            rest = {}
        return tag, line + "  ".join([f"{name}: {text}" for name, text in rest.items()])

    def get_log_after_epoch(
        self, runner: LoggedRun, batch_idx: int, mode: Mode, with_non_scalar: bool = False
    ) -> tuple[dict[str, Any], str]:
        """Format the results of a validation or test pass; `time` and `data_time` are means over the pass, at the end.

        Args:
          runner: the runner.
          batch_idx: index of the last batch, from 0.
          mode: 'val' or 'test'.
          with_non_scalar: the tag contains the pass's infos (arrays, dicts) too; the line always does.

        Returns:
          The tag and the line.

        Raises:
          AssertionError: any other mode.
        """
        _check_mode(mode, ("val", "test"))
        size = _loader_size(runner, mode)
        sources = {entry["data_src"].removeprefix(f"{mode}/") for entry in self.custom_cfg}
        over_the_pass = [
            {"data_src": name, "method_name": "mean", "window_size": "epoch"}
            for name in ("time", "data_time")
            if name not in sources
        ]
        last = min(batch_idx, size - 1)  # a window longer than the pass would reach into the one before
        scalars = self._scalars(runner.message_hub, last, mode, [*self.custom_cfg, *over_the_pass])
        times = self._named({k: v for k, v in scalars.items() if k in ("time", "data_time")}, mode)
        metrics = self._named({k: v for k, v in scalars.items() if k not in ("time", "data_time")}, mode)
        infos = self._named(_of_mode(runner.message_hub.runtime_info, mode), mode)

        epoch = f"[{_epoch(runner, mode)}]" if self.by_epoch and mode == "val" else ""
        header = f"{'Epoch' if self.by_epoch else 'Iter'}({mode}) {epoch}[{size}/{size}]    "
        items = [*metrics.items(), *infos.items(), *times.items()]
        line = header + "  ".join(f"{name}: {self._text(value)}" for name, value in items)
        return {**metrics, **(infos if with_non_scalar else {}), **times}, line

    def _scalars(
        self, hub: MessageHub | HubSnapshot, batch_idx: int, mode: Mode, custom_cfg: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        """Return the statistic of each scalar of the loop, by name without the loop.

        A metric of a validation or test is one exact number for each pass: only times are averaged there.
        """
        histories = _of_mode(hub.log_scalars, mode)
        scalars = {}
        for name, history in histories.items():
            averaged = mode == "train" or name in ("time", "data_time")
            smooth = averaged and self._is_averaged(name)
            scalars[name] = history.mean(self.window_size) if smooth else history.current()
        for entry in custom_cfg:
            arguments = dict(entry)
            source = arguments.pop("data_src").removeprefix(f"{mode}/")
            if source not in histories:
                continue  # a scalar of another loop
            window = {"epoch": batch_idx + 1, "global": histories[source].updates}
            if arguments.get("window_size") in ("epoch", "global"):
                arguments["window_size"] = window[arguments["window_size"]]
            name = arguments.pop("log_name", source).removeprefix(f"{mode}/")
            scalars[name] = histories[source].statistics(**arguments)
        return scalars

    def _named(self, values: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
        return {f"{mode}/{name}": value for name, value in values.items()} if self.log_with_hierarchy else dict(values)

    def _iter_header(self, runner: LoggedRun, batch_idx: int, mode: Mode) -> str:
        inner = self.by_epoch or mode != "train"
        done, total = (batch_idx + 1, _loader_size(runner, mode)) if inner else (runner.iter + 1, runner.max_iters)
        progress = f"[{done:>{len(str(total))}}/{total}]  "
        if not self.by_epoch:
            return f"Iter({mode}) {progress}"
        if mode == "test":
            return f"Epoch(test) {progress}"
        width = 0 if _untrained(runner) else len(str(runner.max_epochs))
        epoch = f"[{_epoch(runner, mode)}]"
        return f"Epoch({mode}) {epoch:>{width + 2}}{progress}"

    def _peak_memory(self) -> int | None:
        """Return the peak memory of any local device since the process began, in MB; None if devices report none."""
        peaks = [device.memory_stats()["peak_bytes_in_use"] for device in self._reporting_devices]
        return max(peaks) // _BYTES_PER_MB if peaks else None

    @functools.cached_property
    def _reporting_devices(self) -> list[jax.Device]:
        return [device for device in jax.local_devices() if "peak_bytes_in_use" in (device.memory_stats() or {})]

    def _text(self, value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.{self.num_digits}f}"
        if isinstance(value, np.ndarray | jax.Array):
            return f"\n{value}\n"  # rows of an array stay below each other
        return str(value)


def _of_mode(values: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
    """Return the entries of the loop, by name without the loop."""
    prefix = f"{mode}/"
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _untrained(runner: LoggedRun) -> bool:
    """Return whether the runner only validates or tests."""
    return runner.train_loop is None


def _epoch(runner: LoggedRun, mode: Mode) -> int:
    """Return the epoch to show: from 1 in training; validation comes after the count went up; 0 without training."""
    if mode == "train":
        return runner.epoch + 1
    return 0 if _untrained(runner) else runner.epoch


def _loader_size(runner: LoggedRun, mode: Mode) -> int:
    loops = {"train": runner.train_loop, "val": runner.val_loop, "test": runner.test_loop}
    return len(loops[mode].dataloader)


def _check_mode(mode: str, legal: Sequence[str]) -> None:
    if mode not in legal:
        raise AssertionError(f"mode must be one of {', '.join(map(repr, legal))}, found {mode!r}")


@functools.partial(checked, owner="")
def _check_window(window_size: Count | Literal["epoch", "global"]) -> None:
    """Check the window of an entry of `custom_cfg`, whose annotation is all there is to it."""


def _check_custom_cfg(custom_cfg: Sequence[Mapping[str, Any]], by_epoch: bool) -> None:
    targets: set[str] = set()
    for index, entry in enumerate(custom_cfg):
        with config_path("custom_cfg", index):
            if "data_src" not in entry:
                raise AssertionError(f"an entry needs 'data_src', the scalar it is about; found {sorted(entry)}")
            target = entry.get("log_name", entry["data_src"])
            if target in targets:
                raise AssertionError(f"two entries give the result {target!r}; each needs a 'log_name' of its own")
            targets.add(target)
            if not by_epoch and "window_size" not in entry:
                raise KeyError("an entry needs 'window_size' when by_epoch=False")
            if not by_epoch and entry["window_size"] == "epoch":
                raise AssertionError("window_size='epoch' needs by_epoch=True; use an int or 'global'")
            if "window_size" in entry:
                _check_window(window_size=entry["window_size"])
            if "method_name" not in entry:
                raise KeyError("an entry needs 'method_name', the statistic: 'mean', 'max', 'min' or 'current'")
            own = ("data_src", "log_name", "method_name")
            statistic = HistoryBuffer().statistic(entry["method_name"])
            arguments = {key: value for key, value in entry.items() if key not in own}
            check_arguments(statistic, {key: value for key, value in arguments.items() if not isinstance(value, str)})
