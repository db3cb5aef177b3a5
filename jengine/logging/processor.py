"""Log processor: the scalars in the message hub as log lines, and as tags for the visualization
backends.
"""

import datetime
import functools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jengine.config.annotations import Count, Index
from jengine.config.errors import ArgumentError, config_path, did_you_mean
from jengine.config.registry import LOG_PROCESSORS, check_arguments
from jengine.logging.console import current_logger, escape_name
from jengine.logging.history import HistoryBuffer

Mode = Literal["train", "val", "test"]

_BYTES_PER_MB = 1024**2
_MODE = re.compile(r"^(train|val|test)/")
_TIMES = ("data_time", "time")
_BUILT_IN = ("mean", "max", "min", "current")  # statistics
# A state of the optimizer, in spite of its name: a mean of powers of two is none. With several
# optimizers the name of one follows.
_LOSS_SCALE = re.compile(r"loss_scale(_[^\W\d]\w*)?")


@LOG_PROCESSORS.register_module()
class LogProcessor:
    """Formatter of log lines, in MMEngine's format, with one statistic for each scalar.

    Scalars whose name matches `mean_pattern` are shown as the mean over the newest `window_size`
    values, all others as the current value, as is the loss scale of mixed precision. `custom_cfg`
    adds or replaces statistics.

    Args:
      window_size: number of values in a mean.
      by_epoch: whether headers count epochs, `Epoch(train) [1][2/4]`, or iterations, `Iter(train)
        [2/40]`.
      custom_cfg: list of `dict(data_src, method_name, window_size, log_name)`: the scalar (without
        the loop), the statistic, the window (a number of values, 'epoch' for those since the start
        of the epoch or validation, or 'global' for all), and the result name (default: `data_src`,
        which replaces the default statistic). Other keys are passed to the statistic.
      num_digits: digits after the decimal point.
      log_with_hierarchy: whether names in the tag include the loop: 'train/loss'.
      mean_pattern: regular expression, searched in names without the loop. By default losses, norms
        and times, not `loss_scale`, which is a setting of the step that used it.

    Raises:
      ArgumentError: two entries of `custom_cfg` have the same result name, or one has the window
        'epoch' with `by_epoch=False`.
      KeyError: an entry has no `data_src`, no known `method_name`, or no `window_size` with
        `by_epoch=False`.
      TypeError, ValueError: an argument that the statistic does not take.

    Examples:
      >>> entry = dict(data_src="loss", log_name="worst", method_name="max", window_size="global")
      >>> processor = LogProcessor(window_size=20, custom_cfg=[entry])
      >>> processor.windows
      {'': 20, 'loss': 20}
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
        self._is_averaged = functools.cache(  # the same names come at each log line
            lambda name: self.mean_pattern.search(name) and not _LOSS_SCALE.fullmatch(name)
        )
        self._absent: set[str] = set()  # sources that a loop did not have
        names: set[str] = set()
        for index, entry in enumerate(self.custom_cfg):
            with config_path("custom_cfg", index):
                arguments = {**entry}
                source = arguments.pop("data_src")
                name = arguments.pop("log_name", source)
                statistic = HistoryBuffer().statistic(arguments.pop("method_name"))
                if name in names:
                    raise ArgumentError(
                        f"result names must be unique, got {name!r} twice; set another 'log_name'"
                    )
                names.add(name)
                # without epochs MMEngine requires a window
                window = entry.get("window_size") if by_epoch else entry["window_size"]
                if window == "epoch" and not by_epoch:
                    raise ArgumentError("`window_size` must not be 'epoch' when by_epoch=False")
                if window in ("epoch", "global"):
                    del arguments["window_size"]
                check_arguments(statistic, arguments)

    @property
    def windows(self) -> dict[str, int]:
        """The longest window of each scalar, by name without the loop.

        That of others has the name ''.
        """
        windows = {"": self.window_size}
        for entry in self.custom_cfg:
            name = _MODE.sub("", entry["data_src"])
            window = entry.get("window_size", 1)
            # the totals have 'epoch' and 'global'; other statistics need all values
            if isinstance(window, str):
                window = 1 if entry["method_name"] in _BUILT_IN else sys.maxsize
            windows[name] = max(windows.get(name, self.window_size), window)
        return windows

    def get_log_after_iter(
        self, runner: Any, batch_idx: int, mode: Mode
    ) -> tuple[dict[str, Any], str]:
        """Format the scalars of an iteration, with the batch `batch_idx`, counted from 0 in the
        loop.

        Returns:
          The tag (name -> number, with `epoch` and `iter`, both from 1, and `memory` if available)
          and the line.
        """
        scalars = self._compute_statistics(runner, batch_idx, mode, self.custom_cfg)
        tag = self._add_mode_prefix(scalars, mode)  # numbers, for the backends
        if self.by_epoch and mode != "test":
            tag["epoch"] = _current_epoch(runner, mode)
        tag["iter"] = runner.iter + 1 if runner.train_loop is not None else 0

        digits = self.num_digits
        rates = []
        others = {}
        for name, value in scalars.items():
            # Rates span many powers of ten, so they are in scientific notation, and first, as in
            # MMEngine.
            if name.endswith("lr"):
                rates.append(f"{escape_name(name)}: {value:.{digits}e}")
            elif mode == "train":
                # in other modes, the hub has the metrics of the previous pass until this one ends
                # without a call
                text = f"{value:.{digits}f}" if type(value) is float else self._format_value(value)
                others[name] = f"{escape_name(name)}: {text}"
        parts = [self._format_header(runner, batch_idx, mode) + " ".join(rates)]
        eta = runner.message_hub.get_info("eta")
        if eta is not None and "time" in scalars and "data_time" in scalars:
            parts.append(f"eta: {datetime.timedelta(seconds=int(eta))}")
            for name in reversed(_TIMES):
                parts.append(others.pop(name, "") or f"{name}: {self._format_value(scalars[name])}")
        if self._reporting_devices:  # the highest peak since the process started
            peaks = (device.memory_stats() for device in self._reporting_devices)
            tag["memory"] = max(peak["peak_bytes_in_use"] for peak in peaks) // _BYTES_PER_MB
            parts.append(f"memory: {tag['memory']}")
        parts.append("  ".join(others.values()))
        # of several processes
        if mode == "train" and (slowest := runner.message_hub.get_info("slowest")):
            parts.append(f"slowest: {slowest}")
        return tag, "  ".join(parts)

    def get_log_after_epoch(
        self, runner: Any, batch_idx: int, mode: Mode, with_non_scalar: bool = False
    ) -> tuple[dict[str, Any], str]:
        """Format the results of a validation or test pass.

        `time` and `data_time` are last, as means over the pass.

        Args:
          batch_idx: index of the last batch, from 0.
          with_non_scalar: whether the tag includes infos (arrays, dicts); the line always does.

        Returns:
          The tag and the line.
        """
        size = getattr(runner, f"{mode}_loop").epoch_length or batch_idx
        mean = {"method_name": "mean", "window_size": "epoch"}  # of custom_cfg, the last one holds
        entries = [*({"data_src": name, **mean} for name in _TIMES), *self.custom_cfg]
        scalars = self._compute_statistics(runner, 0, mode, entries)
        times = {name: scalars.pop(name) for name in _TIMES if name in scalars}
        found = scalars, _select_mode(runner.message_hub.runtime_info, mode), times
        metrics, infos, times = (self._add_mode_prefix(values, mode) for values in found)
        epoch = f"[{_current_epoch(runner, mode)}]" if self.by_epoch and mode == "val" else ""
        header = f"{'Epoch' if self.by_epoch else 'Iter'}({mode}) {epoch}[{size}/{size}]    "
        items = [*metrics.items(), *infos.items(), *times.items()]
        line = header + "  ".join(
            f"{escape_name(name)}: {self._format_value(value)}" for name, value in items
        )
        return {**metrics, **(infos if with_non_scalar else {}), **times}, line

    def _compute_statistics(
        self, runner: Any, batch_idx: int, mode: Mode, custom_cfg: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        """Compute one statistic per scalar in the loop, by name without the loop.

        Validation and test metrics are exact: only times are averaged there.
        """
        hub = runner.message_hub
        histories = _select_mode(hub.log_scalars, mode)
        # their values are old
        left_out = hub.get_info("evaluations_left_out", ()) if mode != "train" else ()
        if left_out:
            histories = {
                name: h for name, h in histories.items() if name.partition("/")[0] not in left_out
            }
        scalars = {}
        for name, history in histories.items():
            is_averaged = (mode == "train" or name in _TIMES) and self._is_averaged(name)
            scalars[name] = history.mean(self.window_size) if is_averaged else history.current()
        for entry in custom_cfg:
            arguments = dict(entry)
            source = arguments.pop("data_src").removeprefix(f"{mode}/")
            if source.partition("/")[0] in left_out:
                continue
            if source not in histories:  # a scalar of another loop, or of a later iteration
                hint = "" if source in self._absent else did_you_mean(source, histories)
                if hint:
                    current_logger().warning(
                        f"log_processor.custom_cfg: there is no scalar {source!r} to log{hint}"
                    )
                self._absent.add(source)
                continue
            history = histories[source]
            name = arguments.pop("log_name", source).removeprefix(f"{mode}/")
            if arguments.get("window_size") == "epoch":
                # The history has the epoch of its newest value: a scalar may have none in this
                # epoch
                has_begun = mode != "train" or history.epoch_start == runner.iter - batch_idx
                if not (has_begun and history.epoch_updates):
                    scalars.pop(name, None)
                    continue
                if arguments["method_name"] not in _BUILT_IN:
                    arguments["window_size"] = history.epoch_updates
            elif arguments.get("window_size") == "global":
                arguments["window_size"] = history.updates
            scalars[name] = history.statistics(**arguments)
        return scalars

    def _add_mode_prefix(self, values: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
        return (
            {f"{mode}/{name}": value for name, value in values.items()}
            if self.log_with_hierarchy
            else dict(values)
        )

    def _format_header(self, runner: Any, batch_idx: int, mode: Mode) -> str:
        counts_batches = self.by_epoch or mode != "train"  # else iterations of the whole run
        size = getattr(runner, f"{mode}_loop").epoch_length if counts_batches else runner.max_iters
        done = batch_idx + 1 if counts_batches else runner.iter + 1
        progress = f"[{done:>{len(str(size))}}/{size}]  " if size is not None else f"[{done}]  "
        # one of several
        evaluation = runner.message_hub.get_info("evaluation") if mode != "train" else ""
        label = f"{mode}/{evaluation}" if evaluation else mode
        if not self.by_epoch:
            return f"Iter({label}) {progress}"
        if mode == "test":
            return f"Epoch({label}) {progress}"
        width = len(str(runner.max_epochs)) if runner.train_loop is not None else 0
        epoch = f"[{_current_epoch(runner, mode)}]"
        return f"Epoch({label}) {epoch:>{width + 2}}{progress}"

    @functools.cached_property
    def _reporting_devices(self) -> list[jax.Device]:
        return [
            device
            for device in jax.local_devices()
            if "peak_bytes_in_use" in (device.memory_stats() or {})
        ]

    def _format_value(self, value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.{self.num_digits}f}"
        if isinstance(value, np.ndarray | jax.Array):
            return f"\n{value}\n"  # keep the rows of an array aligned
        return str(value)


def _select_mode(values: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
    """Return the entries in the loop, by name without the loop."""
    prefix = f"{mode}/"
    return {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}


def _current_epoch(runner: Any, mode: Mode) -> int:
    """Return the epoch to show: from 1 in training; validation runs after the increment.

    0 without training.
    """
    if mode == "train":
        return runner.epoch + 1
    return runner.epoch if runner.train_loop is not None else 0
