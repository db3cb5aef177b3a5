"""Message hub: scalars with histories, and other infos, for loggers to read.

Step metrics stay on the device, so that the loop never waits for them; the first read of a scalar
fetches all pending arrays in one transfer.
"""

import bisect
import collections
import logging
import operator
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from jengine.config.errors import ArgumentError, UnknownNameError, closest
from jengine.config.json_codec import to_plain
from jengine.logging.history import HistoryBuffer, to_float
from jengine.logging.loss_watch import WATCHED, LossWatch
from jengine.logging.pending_scalars import Part, PendingScalars

_WHOLE: tuple[tuple[int | None, slice]] = ((None, slice(None)),)
_ALL: Mapping[str, Any] = types.MappingProxyType({})  # each iteration reports each metric
# device array types seen so far: `isinstance(value, jax.Array)` is slower than an update
_ARRAY_TYPES: set[type] = set()


class MessageHub:
    """Store of scalars with history, and of infos without.

    A scalar (`update_scalar`) has a `HistoryBuffer`; an info (`update_info`) is just the latest
    value, of any type. Keys start with the loop: 'train/', 'val/' or 'test/'.

    Args:
      name: the hub name.
      capacity: number of pending scalar updates beyond which the hub fetches them, so that memory
        is bounded.

    Attributes:
      iteration: the training iteration for subsequent scalar updates.
      before_read: called before a scalar is read; the Runner flushes its log writer here, whose
        pending jobs hold earlier scalars (see `snapshot`).
      last_snapshot: iteration of the last snapshot.
      losses: receives the fetched scalars; None in runs that do not check losses.

    Examples:
      >>> hub = MessageHub("run")
      >>> hub.update_scalars({"train/loss": jax.numpy.ones(())})
      >>> hub.update_scalar("train/loss", 3.0)
      >>> hub.get_scalar("train/loss").mean()
      2.0
    """

    _instances: ClassVar["weakref.WeakValueDictionary[str, MessageHub]"] = (
        weakref.WeakValueDictionary()
    )
    # Strong references to the hubs without a run, and to that of the newest run: the others live as
    # long as their runs.
    _kept: ClassVar[dict[str, "MessageHub"]] = {}
    _newest: ClassVar["MessageHub | None"] = None

    def __init__(self, name: str = "jengine", capacity: int = 10_000) -> None:
        self.name = name
        self.before_read: Callable[[], None] | None = None
        self.losses: LossWatch | None = None
        self.last_snapshot = -1
        self._capacity = capacity
        self._counts: collections.Counter[str] = collections.Counter()  # snapshots count as well
        self.iteration = 0
        self._pending = PendingScalars()
        self._log_scalars: dict[str, HistoryBuffer] = {}
        self._runtime_info: dict[str, Any] = {}
        self._resumed: dict[str, bool] = {}
        self._windows: Mapping[str, int] = {}
        self._epoch_starts = [0]  # iterations
        self._weight: Any = None  # of the current iteration, or of each one in the current chunk
        # metrics with a weight: whether that is by examples, or only 0 and 1
        self._is_by_example: dict[str, bool] = {}

    @classmethod
    def get_instance(cls, name: str) -> "MessageHub":
        """Return the hub called `name`, created at the first call."""
        hub = cls._instances.get(name)
        if hub is None:
            hub = cls._kept[name] = cls._instances[name] = cls(name)
        return hub

    @classmethod
    def new_instance(cls, name: str) -> "MessageHub":
        """Create an empty hub that replaces the hub called `name` and becomes the current one.

        `get_instance` finds it as long as something refers to it, or it is the newest.
        """
        cls._kept.pop(name, None)
        cls._instances.pop(name, None)
        # Weak in `_instances`: a process that makes many runs must not keep all of their histories.
        hub = cls._newest = cls._instances[name] = cls(name)
        return hub

    @classmethod
    def get_current_instance(cls) -> "MessageHub":
        """Return the hub created last; the hub called 'jengine' if none exists."""
        hubs = list(cls._instances.values())  # in the order of creation
        return hubs[-1] if hubs else cls.get_instance("jengine")

    @property
    def fetches(self) -> int:
        """The number of transfers from the device so far."""
        return self._counts["fetches"]

    @property
    def instance_name(self) -> str:
        """The hub name, as MMEngine calls it."""
        return self.name

    def start_iteration(self, iteration: int, epoch_start: int = 0) -> None:
        """Set the iteration for subsequent scalars; fetch pending ones from half the capacity on.

        `epoch_start` is the iteration at which the current epoch started.
        """
        self.iteration = iteration
        self._weight = None
        if "iter" in self._runtime_info:
            self._runtime_info["iter"] = iteration
        if epoch_start > self._epoch_starts[-1]:
            self._epoch_starts.append(epoch_start)  # values of the last epoch may be pending
        elif epoch_start < self._epoch_starts[-1]:  # another training
            self.flush()
            self._epoch_starts = [epoch_start]
        # Here, between two steps, rather than at some scalar in the middle of one.
        if 2 * self._pending.size >= self._capacity:
            self.flush()

    def start_pass(self, mode: str) -> None:
        """Begin the window 'epoch' of validation or test scalars; this fetches pending ones."""
        for key, history in self.log_scalars.items():
            if key.startswith(f"{mode}/"):
                history.start_epoch(self.iteration)

    def keep(self, windows: Mapping[str, int]) -> None:
        """Keep the newest values, also in checkpoints: how many by name without the loop, by the
        name '' of others.
        """
        self._windows = windows
        for key, history in self.log_scalars.items():
            history.keep(self._window(key))

    def record(
        self,
        metrics: Mapping[str, Any],
        rates: Mapping[str, float],
        data_time: float,
        seconds: float,
        index: int | None = None,
        reports: Mapping[str, np.ndarray] = _ALL,
    ) -> None:
        """Append a training iteration to the histories `train/...`, without waiting for the device.

        Nothing is copied or computed: the next reader of a scalar does that for many iterations.

        Args:
          metrics: one-element arrays or numbers by name; those of a chunk are real[K].
          rates: learning rates by name.
          data_time: seconds that the loop waited for the batch.
          seconds: seconds since the previous iteration.
          index: the position in a chunk; None for a single step.
          reports: bool[K] by name, for metrics of a chunk that some iterations do not report.
        """
        pending = self._pending
        pending.records.append(
            (self.iteration, metrics, index, reports, rates, data_time, seconds, self._weight)
        )
        pending.size += len(metrics)

    def update_weight(self, value: Any, is_by_example: Mapping[str, bool]) -> None:
        """Set the weight in means of the current iteration's metrics, without waiting for the
        device.

        Args:
          value: the share of real examples in the batch, real[], or real[K] for a chunk; 0 for an
            iteration that does not count.
          is_by_example: the metrics with this weight; those with False have the weight 1 instead,
            or 0.
        """
        self._weight = value
        self._is_by_example = dict(is_by_example)

    def update_scalar(self, key: str, value: Any, count: int = 1, resumed: bool = True) -> None:
        """Append `value` to the history of `key` without waiting for the device.

        Args:
          key: the name, usually with a loop: 'train/loss'.
          value: a number or a one-element array (NumPy or device array); for `count` > 1, the sum
            over the samples.
          count: number of samples in `value`.
          resumed: whether checkpoints contain this key.

        Raises:
          TypeError: `value` is not a real number, or is traced, or `count` is not an integer.
            ValueError: `value` does not have one element, or `count` is below 1. ArgumentError:
            `resumed` differs from earlier updates of the key.
        """
        # The common cases are one type comparison: this runs for each scalar of each step.
        if type(value) is not float and not (type(value) in _ARRAY_TYPES and value.shape == ()):
            # a tracer is a jax.Array too, and would be kept after its trace has ended
            is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
            if is_array and value.size == 1:
                _ARRAY_TYPES.add(type(value))
            else:
                try:
                    value = to_float(value)
                except (TypeError, ValueError) as error:
                    error.add_note(f"in the scalar {key!r}")
                    raise
        if count != 1 and (count := operator.index(count)) < 1:
            raise ValueError(f"`count` of {key!r} must be at least 1, got {count}")
        if self._resumed.get(key) is not resumed:
            self._check_resumed(key, resumed)
        if count == 1:
            steps, values = self._pending.columns.get(key) or self._pending.start_column(key)
            steps.append(self.iteration)
            values.append(value)
        else:
            self._pending.add(key, value, self.iteration, count)
        self._pending.size += 1
        if self._pending.size >= self._capacity:
            self.flush()

    def update_scalars(self, scalars: Mapping[str, Any], resumed: bool = True) -> None:
        """Call `update_scalar` for each item; a value is a scalar or `dict(value=..., count=...)`.

        Raises:
          TypeError: a dict lacks 'value' or has other keys.
        """
        for key, value in scalars.items():
            arguments = value if isinstance(value, dict) else {"value": value}
            self.update_scalar(key, resumed=resumed, **arguments)

    def update_info(self, key: str, value: Any, resumed: bool = True) -> None:
        """Set the info `key` to a value of any type; `resumed` as in `update_scalar`."""
        if self._resumed.get(key) is not resumed:
            self._check_resumed(key, resumed)
        self._runtime_info[key] = value

    def update_info_dict(self, infos: Mapping[str, Any], resumed: bool = True) -> None:
        """Call `update_info` for each item of a mapping."""
        for key, value in infos.items():
            self.update_info(key, value, resumed)

    def pop_info(self, key: str, default: Any = None) -> Any:
        """Remove the info `key` and return it, or `default` if there is none."""
        return self._runtime_info.pop(key, default)

    def get_info(self, key: str, default: Any = None) -> Any:
        """Return the info `key`, or `default` if there is none."""
        return self._runtime_info.get(key, default)

    def get_scalar(self, key: str) -> HistoryBuffer:
        """Return the history of the scalar `key`, with pending values.

        KeyError, with a suggestion, for no scalar.
        """
        self.flush()
        if key not in self._log_scalars:
            raise UnknownNameError(f"no scalar is called {key!r}{closest(key, self._log_scalars)}")
        return self._log_scalars[key]

    @property
    def log_scalars(self) -> dict[str, HistoryBuffer]:
        """All histories by key; reading them fetches pending values."""
        self.flush()
        return self._log_scalars

    @property
    def runtime_info(self) -> dict[str, Any]:
        """All infos by key."""
        return self._runtime_info

    def flush(self) -> None:
        """Move pending scalars into the histories, with one transfer for all device arrays.

        Raises:
          RuntimeError: the device failed; pending values are dropped, so that the error is raised
            only once.
        """
        if self.before_read is not None:
            self.before_read()
        pending = self._pending
        self._pending = PendingScalars()
        self._move_to_histories(pending)

    def snapshot(self) -> "MessageHub":
        """Return a hub with the pending scalars up to the current iteration and a copy of the
        infos, for a reader in another thread.

        Snapshots share the hub's histories, so you should flush them in the order of creation.
        """
        snapshot = object.__new__(type(self))  # `copy.copy` takes several times as long
        vars(snapshot).update(vars(self))
        snapshot.before_read = None
        snapshot._runtime_info = dict(self._runtime_info)
        # the loop goes on without a lock
        self._pending = snapshot._pending.split(self.iteration)
        self.last_snapshot = self.iteration
        return snapshot

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state for checkpoints, whose size does not grow with the
        run.

        Keys with `resumed=False` are omitted, infos that JSON cannot store are omitted with a
        warning; tuples become lists, and NumPy numbers become Python numbers.
        """
        scalars = {key: h.state_dict() for key, h in self.log_scalars.items() if self._resumed[key]}
        infos = {}
        for key, value in self._runtime_info.items():
            if not self._resumed[key]:
                continue
            try:
                # Arrays among infos may be predictions of any size, which do not belong into a
                # checkpoint.
                infos[key] = to_plain(value, key, arrays=False)
            except TypeError:
                kind = type(value).__name__ + (
                    f" of shape {value.shape}" if hasattr(value, "shape") else ""
                )
                logging.getLogger("jengine").warning(
                    f"info {key!r} is not saved: {kind} is not JSON-serializable (resumed=False "
                    "silences this warning)"
                )
        return {"log_scalars": scalars, "runtime_info": infos}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`.

        Other keys, and those with `resumed=False` since, are unchanged.
        """
        self.flush()
        for key, history in state["log_scalars"].items():
            # A key that this run has declared as not resumed keeps its value: hooks set it before
            # the state is loaded.
            if self._resumed.setdefault(key, True):
                self._start_history(key).load_state_dict(history)
        for key, value in state["runtime_info"].items():
            if self._resumed.setdefault(key, True):
                self._runtime_info[key] = value

    def __repr__(self) -> str:
        counts = f"{len(self._log_scalars)} scalars, {self._pending.size} pending updates"
        return f"MessageHub({self.name!r}, {counts}, {len(self._runtime_info)} infos)"

    def _check_resumed(self, key: str, resumed: bool) -> None:
        """Record `resumed` for a new key; check that it does not change for a known one."""
        if self._resumed.setdefault(key, resumed) is not resumed:
            raise ArgumentError(
                f"`resumed` of {key!r} must be {not resumed} as in earlier updates, got {resumed}"
            )

    def _move_to_histories(self, pending: PendingScalars) -> None:
        parts, has_fetched = pending.fetch()
        self._counts["fetches"] += has_fetched
        for part in parts:
            key = part.key
            self._resumed.setdefault(key, True)
            history = self._log_scalars.get(key)
            if history is None:
                history = self._start_history(key)
            if self.losses is not None and key.startswith(WATCHED):
                before = history.current() if history.updates else 0.0
                self.losses.add(key, part.steps, part.values, before)
            weights = self._find_weights(part)
            is_train = key.startswith("train/")  # validations begin their windows themselves
            for epoch_start, rows in self._split_by_epoch(part.steps) if is_train else _WHOLE:
                if epoch_start is not None and epoch_start != history.epoch_start:
                    history.start_epoch(epoch_start)
                history.extend(part.values[rows], part.count, weights and weights[rows])

    def _start_history(self, key: str) -> HistoryBuffer:
        history = self._log_scalars[key] = HistoryBuffer()
        history.keep(self._window(key))
        return history

    def _window(self, key: str) -> int:
        """Return how many values of a scalar the log needs."""
        name = key.partition("/")[2]
        return self._windows.get(name, self._windows.get("", 1))

    def _find_weights(self, part: Part) -> list[float] | None:
        """Return the weights of a metric's values; None if all are 1."""
        is_by_example = self._is_by_example.get(part.key.removeprefix("train/"))
        if part.weights is None or is_by_example is None:
            return None
        return part.weights if is_by_example else [float(weight > 0) for weight in part.weights]

    def _split_by_epoch(self, iterations: list[int]) -> list[tuple[int | None, slice]]:
        """Return the start of each epoch and the positions of its values."""
        starts = self._epoch_starts
        if iterations[0] >= starts[-1]:  # nearly always
            return [(starts[-1], slice(None))]
        found: list[tuple[int | None, slice]] = []
        begin = 0
        while begin < len(iterations):
            epoch = bisect.bisect_right(starts, iterations[begin])
            end = len(iterations)
            if epoch < len(starts):
                end = bisect.bisect_left(iterations, starts[epoch])
            found.append((starts[max(epoch - 1, 0)], slice(begin, end)))
            begin = end
        return found
