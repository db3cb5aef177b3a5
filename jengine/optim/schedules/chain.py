"""Chain of the schedules of one optimizer: the value of each hyperparameter as a function of the step.

MMEngine's schedules change the current value, each what the one before has left. The chain keeps that recursion apart
from the parameter groups: it knows the values before any schedule, and computes those at a step from them alone. The
groups only receive the result.

Two things besides the step change a value, and are kept as events: reductions on a plateau, and values that are set
by hand (`runner.set_lr`, `param_groups[i]['lr'] = ...`), of which the newest counts. A value that is set replaces the
current one, and the schedule goes on from it: what multiplies the value multiplies the new one, and what sets it
(optax, one-cycle, a restart) sets it times new over old.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from jengine.annotations import is_host_number
from jengine.errors import ConfigError
from jengine.optim.schedules.rules import Changes

Group: TypeAlias = MutableMapping[str, Any]  # a parameter group: host numbers by name
_MAX = 3.4028235e38  # of float32, the dtype of hyperparameters on the device
_CHUNK = 2**18  # values computed at once
_VECTOR = 8  # more groups are computed as arrays, fewer as Python floats
_ROUNDING = 1e-12  # a product of ratios may end just below 0
_RANGES = {"lr": (-_ROUNDING, _MAX), "weight_decay": (-_ROUNDING, _MAX), "momentum": (-_ROUNDING, 1 + _ROUNDING)}


class Groups(Protocol):
    """The part of an optimizer wrapper that a scheduler uses; it may also have `base_param_settings`."""

    @property
    def param_groups(self) -> Sequence[Group]:
        """Mappings of host numbers by name (`lr`, `momentum`, ...)."""


class Override(NamedTuple):
    """The newest value that was set by hand in a group."""

    iters: int  # completed iterations and epochs at that time
    epochs: int
    name: str
    group: int
    value: float
    scale: float = 1.0  # see `Value`
    is_muted: bool = False  # set while a warm-up from 0 muted the value


class Value:
    """The value of one hyperparameter in one group.

    Attributes:
      current: what the schedules compute with; hidden while a warm-up from 0 mutes it.
      scale: new over old value, of the values that were set by hand.
      shown: a value that was set by hand while the value was muted.
      written: what the group received.
    """

    __slots__ = ("current", "scale", "shown", "written")

    def __init__(self, current: float) -> None:
        self.current = self.written = current
        self.scale = 1.0
        self.shown: float | None = None

    def set(self, value: float, is_muted: bool) -> None:
        """Set the value by hand."""
        if is_muted:  # there is no ratio to 0, so that this lasts until the schedule leaves it
            self.shown = value
            return
        if self.current != 0.0:
            self.scale *= value / self.current
        self.current = value


Event: TypeAlias = Callable[[Value], None]  # changes a value at one time


class _Rows(NamedTuple):
    """What changes one hyperparameter in one group, in the order of training."""

    times: np.ndarray  # float64[n]; an epoch ends half an iteration after its last one
    members: np.ndarray  # int64[n], positions in the chain; for an event below 0
    steps: np.ndarray  # int64[n], of the member
    changes: Changes


class _Curve(NamedTuple):
    """Values of a hyperparameter in some groups over the run."""

    rows: _Rows
    groups: list[int]
    finals: list[Value]  # by group, once `parts` are read
    parts: Iterator[tuple[int, np.ndarray]]  # the first of some rows, and the values after each of them, float64[n, G]


class ScheduleChain:
    """The schedules of one optimizer, in the order of the config.

    >>> from jengine.optim import SGD, OptimWrapper
    >>> from jengine.optim.schedules import build_param_schedulers, chain_of
    >>> wrapper = OptimWrapper(SGD(lr=0.1))
    >>> cfg = dict(type="StepLR", step_size=2, gamma=0.5, by_epoch=False)
    >>> schedulers = build_param_schedulers(cfg, wrapper, max_epochs=None, max_iters=6, epoch_length=None)
    >>> chain_of(wrapper).at(3)[0]["lr"], chain_of(wrapper).at(range(6))[0]["lr"].tolist()
    (0.05, [0.1, 0.1, 0.05, 0.05, 0.025, 0.025])

    Args:
      optimizer: the optimizer wrapper, or any object with `param_groups`.

    Attributes:
      members: the schedulers.
      epoch_length: iterations per epoch; None if unknown, then `epoch_ends` has the iteration at which each has ended.
      overrides: the values that were set by hand.
    """

    def __init__(self, optimizer: Groups) -> None:
        self.optimizer = optimizer
        self.members: list[Any] = []  # `ParamScheduler`s, whose module imports this one
        self.epoch_length: int | None = None
        self.epoch_ends: list[int] = []
        self.overrides: list[Override] = []
        default = default_group(optimizer)
        # with several groups, the optimizer's own settings are one more group, so that multipliers keep a reference
        self._separate = None if any(group is default for group in optimizer.param_groups) else default
        self._base: list[dict[str, Any]] = []  # the groups before any schedule
        self._values: dict[str, list[Value | None]] = {}  # by name and group, of scheduled hyperparameters
        self._ranges: dict[str, tuple[float, float]] = {}
        self._muting: dict[str, list[Any]] = {}
        self._mirrored = False
        self.rebase()

    @property
    def groups(self) -> Sequence[Group]:
        """The parameter groups, and the optimizer's own settings last if those are apart."""
        groups = self.optimizer.param_groups
        return groups if self._separate is None else [*groups, self._separate]

    def count(self, by_epoch: bool, name: str | None = None) -> int:
        """Return the completed epochs or iterations, as the schedules count them; those of one value if it has any."""
        counts = [m.global_step for m in self.members if m.by_epoch is by_epoch and m.param_name == name]
        counts = counts or [m.global_step for m in self.members if m.by_epoch is by_epoch]
        return max(counts, default=0)

    # --- Building ---

    def rebase(self, *, recorded: bool = True) -> None:
        """Take the current group settings as those before any schedule.

        With `recorded`, a group that has `initial_lr` has that rate before any schedule, as in MMEngine.
        """
        self._base = []
        for group in self.groups:
            initial = {key: group[key] for key in group if key.startswith("initial_")}
            base = {key: value for key, value in group.items() if key not in initial}
            if recorded:
                base |= {key.removeprefix("initial_"): value for key, value in initial.items()}
            self._base.append(base)

    def begin(self) -> None:
        """Remove all schedules, and return their values to those before; a value set by hand since stays."""
        for name, values in self._values.items():
            for index, value in enumerate(values):
                if value is not None:
                    if (now := self._read(name, index)) == value.written:
                        now = self._base[index][name]
                    self._store(name, index, now)
                    self.groups[index].pop(f"initial_{name}", None)
        self.members, self.overrides, self.epoch_ends, self._values = [], [], [], {}
        self.rebase()

    def arrange(self, members: Sequence[Any]) -> None:
        """Set the members in the order in which they act, and compute the current values."""
        self.members = list(members)
        self.refresh()

    def add(self, member: Any) -> None:
        """Append a member, whose first step then acts on the current values."""
        self.members.append(member)
        try:
            self._bind()
        except Exception:
            self.members.pop()
            raise

    def _bind(self) -> None:
        """Bind each member to the values from which it starts, and to its groups."""
        initials: dict[str, list[float | None]] = {}
        for member in self.members:
            name = member.param_name
            if name not in initials:
                if member.mirrors_betas:
                    # MMEngine schedules `momentum`, which Adam does not have: the first beta follows it
                    for base, group in zip(self._base, self.groups, strict=True):
                        if "betas" in base:
                            base["momentum"] = float(base["betas"][0])
                            group.setdefault("momentum", base["momentum"])
                initials[name] = [float(base[name]) if name in base else None for base in self._base]
                if name not in self._values:
                    self._values[name] = [None if value is None else Value(value) for value in initials[name]]
            # Some rules start elsewhere (one-cycle), and so do later members then.
            initials[name] = list(member.bind(initials[name], self.groups))
        groups = self.groups
        for name, values in initials.items():
            for group, value in zip(groups, values, strict=True):
                if value is not None:
                    group[f"initial_{name}"] = value
        # For `advance`, in which each look-up counts
        self._ranges = {name: value_range(name) for name in initials}
        self._muting = {name: [m for m in self.members if m.param_name == name and m.muted_steps] for name in initials}
        self._mirrored = any(member.mirrors_betas for member in self.members)
        for m in self.members:
            cells = self._values[m.param_name]
            m.cells = [(i, groups[i], cells[i], m.targets[i], m.base_values[i]) for i in sorted(m.scheduled)]

    # --- Values at any step ---

    def at(self, step: int | Iterable[int], epoch: int | Iterable[int] | None = None) -> dict[int, dict[str, Any]]:
        """Return the scheduled hyperparameters of each group at a step, whatever the current one is.

        Args:
          step: completed iterations, one number or many. In a chain that counts epochs alone, without an epoch
            length, completed epochs.
          epoch: completed epochs, as many; by default those that have ended at `step`.

        Returns:
          By group, and by name, a float; float64[n] for n steps. The optimizer's own settings are the last group if
          there are several.
        """
        steps = np.atleast_1d(np.asarray(step if isinstance(step, int | np.ndarray) else list(step), np.int64))
        epochs = np.broadcast_to(self._epochs_at(steps) if epoch is None else np.asarray(epoch), steps.shape)
        times = np.maximum(steps, self._epoch_times(epochs))
        found: dict[int, dict[str, Any]] = {index: {} for index in range(len(self.groups))}
        last = int(steps.max(initial=0)), int(epochs.max(initial=0))
        for name in self._values:
            muted = self._is_muted(name, steps, epochs)
            for curve in self._curves(name, *last):
                at = np.searchsorted(curve.rows.times, times, "right")  # rows that have acted
                results = np.empty((len(times), len(curve.groups)))
                results[at == 0] = self._start(name, curve.groups)
                for first, values in curve.parts:
                    inside = (at > first) & (at <= first + len(values))
                    results[inside] = values[at[inside] - first - 1]
                results[muted] = 0.0
                for column, index in enumerate(curve.groups):
                    for override in self._overrides_of(name, index):
                        if override.is_muted:
                            results[muted & (times >= self._time(override)), column] = override.value
                    result = results[:, column]
                    found[index][name] = float(result[0]) if np.ndim(step) == 0 else result  # type: ignore[arg-type]
        return found

    def check(self, iters: int, epochs: int) -> None:
        """Raise ConfigError if a value up to this step is outside the range of its hyperparameter."""
        for name in self._values:
            lowest, highest = value_range(name)
            for curve in self._curves(name, iters, epochs):
                for first, values in curve.parts:
                    illegal = np.argwhere(~((values >= lowest) & (values <= highest)))
                    if len(illegal):
                        row, column = illegal[0]
                        member = self.members[curve.rows.members[first + row]]
                        raise member.value_error(float(values[row, column]), int(curve.rows.steps[first + row]))

    def refresh(self) -> None:
        """Compute the current values from the members' counters, and write them into the groups."""
        self._bind()
        for name in self._values:
            for curve in self._curves(name):
                latest = self._start(name, curve.groups)
                for _, values in curve.parts:
                    latest = values[-1] if len(values) else latest
                for index, current, final in zip(curve.groups, latest.tolist(), curve.finals, strict=True):
                    value: Any = self._values[name][index]
                    value.current, value.scale, value.shown = current, final.scale, final.shown
                    self._write(name, index, value)

    def _start(self, name: str, groups: Sequence[int]) -> np.ndarray:
        return np.array([float(self._base[index][name]) for index in groups])

    def _curves(self, name: str, iters: int | None = None, epochs: int | None = None) -> Iterator[_Curve]:
        """Yield the values of all groups that have a hyperparameter, up to a step; see `_rows`.

        Groups with the same members and no events are computed together.
        """
        together: dict[tuple[int, ...], list[int]] = {}
        for index, value in enumerate(self._values[name]):
            if value is None:
                continue
            positions = tuple(i for i, m in enumerate(self.members) if m.param_name == name and index in m.scheduled)
            times, events = self._events(name, index, positions, iters)
            if not events:
                together.setdefault(positions, []).append(index)
                continue
            yield self._curve(name, [index], self._rows(positions, times, iters, epochs), events)
        for positions, groups in together.items():
            yield self._curve(name, groups, self._rows(positions, [], iters, epochs), [])

    def _curve(self, name: str, groups: list[int], rows: _Rows, events: Sequence[Event]) -> _Curve:
        finals = [Value(start) for start in self._start(name, groups).tolist()]
        return _Curve(rows, groups, finals, self._trace(groups, rows, finals, events))

    def _trace(
        self, groups: list[int], rows: _Rows, finals: list[Value], events: Sequence[Event]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first of some consecutive rows, and the value of each group after each of them, float64[n, G]."""

        def table(get: Callable[[Any, int], float | None]) -> np.ndarray:
            return np.array([[get(m, i) or 0.0 if i in m.scheduled else 0.0 for i in groups] for m in self.members])

        targets, initials = table(lambda m, i: m.targets[i]), table(lambda m, i: m.base_values[i])
        floors = np.array([m.min_value for m in self.members])
        latest = np.array([final.current for final in finals])
        size = max(_CHUNK // len(groups), 1)  # bounds the memory
        splits = np.flatnonzero(rows.members < 0).tolist()  # the events
        edges = *range(size, len(rows.times), size), *splits, *(split + 1 for split in splits)
        stops = sorted({*edges, len(rows.times)} - {0})
        for start, stop in itertools.pairwise([0, *stops]):
            members = rows.members[start:stop]
            if stop - start == 1 and members[0] < 0:  # of a single group, see `_curves`
                (final,) = finals
                final.current = float(latest[0])
                events[-1 - members[0]](final)
                values = np.array([[final.current]])
            else:
                a, b, c = (column[start:stop, None] for column in rows.changes)
                b, c = b * targets[members], c * initials[members]
                if finals[0].scale != 1.0:  # what sets the value, sets it times what the hand has made of it
                    b, c = b * np.where(a == 0.0, finals[0].scale, 1.0), c * np.where(a == 0.0, finals[0].scale, 1.0)
                values = _apply(latest, a, b, c, floors[members])
            latest = values[-1] if len(values) else latest
            yield start, values

    def _rows(self, positions: Sequence[int], events: Sequence[float], iters: int | None, epochs: int | None) -> _Rows:
        """Return what the members at `positions` do up to a step, and the events at the given times.

        Without a step they end at the members' own counters. Then only the last value counts, and of a member that sets
        the value the last row.
        """
        parts = []
        for i in positions:
            member = self.members[i]
            count = member.global_step if iters is None or epochs is None else (epochs if member.by_epoch else iters)
            steps = member.active_steps(count)
            steps = steps[-1:] if member.sets_value and iters is None and not events else steps
            changes = member.changes(steps)
            is_change = (changes[0] != 1.0) | (changes[1] != 0.0) | (changes[2] != 0.0)
            steps, columns = steps[is_change], [column[is_change] for column in changes]
            times = self._epoch_times(steps) if member.by_epoch else steps.astype(np.float64)
            parts.append((times, np.full(len(steps), i), steps, *columns))
        count, zeros = len(events), np.zeros(len(events))
        parts.append((np.array(events), -1 - np.arange(count), np.zeros(count, np.int64), zeros + 1.0, zeros, zeros))
        joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
        if len(parts) > 2 or count:
            # In one iteration the members act in list order, then the events
            order = np.argsort(joined[0], kind="stable")
            joined = [column[order] for column in joined]
        at, member, step, *changed = joined
        return _Rows(at, member, step, (changed[0], changed[1], changed[2]))

    def _events(
        self, name: str, index: int, positions: Sequence[int], last: int | None
    ) -> tuple[list[float], list[Event]]:
        """Return the times of what has changed a value besides the steps, and functions that do it again."""
        events: list[tuple[float, Event]] = []
        for i in positions:  # first, as they are part of a step
            for iters, epochs, act in self.members[i].events(index, last):
                events.append((max(iters, float(self._epoch_times(epochs))), act))
        for override in self._overrides_of(name, index):
            events.append((self._time(override), functools.partial(_set, override)))
        events.sort(key=lambda event: event[0])
        return [time for time, _ in events], [event for _, event in events]

    def _overrides_of(self, name: str, index: int) -> list[Override]:
        return [override for override in self.overrides if (override.name, override.group) == (name, index)]

    def _is_muted(self, name: str, iters: Any, epochs: Any) -> Any:
        """Return whether a warm-up from 0 mutes the value, bool or bool[n]."""
        muted: Any = np.zeros(np.shape(iters), bool)
        for member in self._muting[name]:
            now = (epochs if member.by_epoch else iters) - math.ceil(member.begin)
            muted = muted | ((now >= 0) & (now < member.muted_steps))
        return muted

    def _time(self, override: Override) -> float:
        return max(override.iters, float(self._epoch_times(override.epochs)))

    def _epoch_times(self, epochs: Any) -> Any:
        """Return the times at which epochs have ended, 0 for none."""
        if self.epoch_length is not None:
            return np.where(np.asarray(epochs) > 0, np.asarray(epochs) * self.epoch_length + 0.5, 0.0)
        known = np.array([0.0, *(end + 0.5 for end in self.epoch_ends)])
        later = 1e15 + np.asarray(epochs)  # after all iterations
        return np.where(np.asarray(epochs) < len(known), known[np.minimum(epochs, len(known) - 1)], later)

    def _epochs_at(self, steps: np.ndarray) -> np.ndarray:
        if self.epoch_length is not None:
            return steps // self.epoch_length
        if all(member.by_epoch for member in self.members):
            return steps
        return np.searchsorted(self.epoch_ends, steps, "right")

    # --- Training ---

    def advance(self, member: Any) -> bool:
        """Apply the current step of a member to the current values; return whether it may change them."""
        # A run calls this once per iteration and schedule: keep it short
        name = member.param_name
        a, b, c = member.change(member.last_step) or (1.0, 0.0, 0.0)
        muting = self._muting[name]
        if a == 1.0 and b == 0.0 and c == 0.0 and not muting:
            return False
        lowest, highest = self._ranges[name]
        least, is_plain = member.min_value, not (muting or self._mirrored)
        for index, group, value, target, initial in member.cells:
            if a == 0.0:
                new = b * target * value.scale + c * initial * value.scale
            else:
                new = a * value.current + b * target + c * initial
            new = least if new < least else new
            if not lowest <= new <= highest:  # also NaN
                raise member.value_error(new, member.global_step)
            value.current = new
            if is_plain:
                group[name] = value.written = new
            else:
                self._write(name, index, value)
        return True

    def end_epoch(self, epochs: int) -> None:
        """Record at which iteration an epoch has ended, if epochs have no known length."""
        is_unknown = self.epoch_length is None and len(self.epoch_ends) == epochs - 1
        if is_unknown and any(not member.by_epoch for member in self.members):
            self.epoch_ends.append(self.count(by_epoch=False))

    def apply_event(self, member: Any) -> None:
        """Apply the newest event of a member, such as a reduction on a plateau."""
        for index in member.scheduled:
            *_, (_, _, act) = member.events(index)
            value: Any = self._values[member.param_name][index]
            act(value)
            self._write(member.param_name, index, value)

    def set_value(self, name: str, value: float) -> None:
        """Set a hyperparameter of the optimizer by hand; each group gets its multiple, as before any schedule."""
        if not is_host_number(value):
            raise ConfigError(f"`{name}` must be a number, got {value!r}")
        if not all(name in base for base in self._base):
            raise ConfigError(f"`{name}` must be a known hyperparameter of the optimizer, got one without it")
        reference = float(self._base[-1 if self._separate is not None else 0][name])
        for index, base in enumerate(self._base):
            self._store(name, index, float(value) * (base[name] / reference if reference else 1.0))

    def sync(self, name: str) -> None:
        """Take over the values of a scheduled hyperparameter that were set by hand since the last step."""
        for index, value in enumerate(self._values.get(name, ())):
            if value is None or (now := self._read(name, index)) == value.written:
                continue
            lowest, highest = value_range(name)
            if not is_host_number(now) or not lowest <= now <= highest:
                raise ConfigError(f"`{name}` of a parameter group must be {legal_values(name)}, got {now!r}")
            muted = self._is_muted_now(name)
            value.set(float(now), muted)
            # In this iteration the schedules of other values may have stepped already
            iters, epochs = self.count(by_epoch=False, name=name), self.count(by_epoch=True, name=name)
            new = Override(iters, epochs, name, index, float(now), value.scale, muted)
            # It is all that later values depend on; before a warm-up from 0, which hides it, an older one is too
            self.overrides = [old for old in self.overrides if old[2:4] != new[2:4] or (muted and not old.is_muted)] + [
                new
            ]
            self._write(name, index, value)

    def _is_muted_now(self, name: str) -> bool:
        return any(0 <= member.last_step < member.muted_steps for member in self._muting[name])

    def _write(self, name: str, index: int, value: Value) -> None:
        if not self._is_muted_now(name):
            value.shown = None
            value.written = value.current
        else:
            value.written = 0.0 if value.shown is None else value.shown
        self._store(name, index, value.written)

    def _store(self, name: str, index: int, value: float) -> None:
        group = self.groups[index]
        group[name] = value
        if self._mirrored and name == "momentum" and "betas" in group:
            group["betas"] = (value, *group["betas"][1:])

    def _read(self, name: str, index: int) -> Any:
        group, value = self.groups[index], self._values[name][index]
        is_mirrored = self._mirrored and name == "momentum" and "betas" in group
        if is_mirrored and value is not None and group["betas"][0] != value.written:
            return group["betas"][0]
        return group[name]

    # --- Checkpoints ---

    def state_dict(self, name: str) -> list[dict[str, Any]]:
        """Return the values of a scheduled hyperparameter that were set by hand, JSON-serializable.

        Where epochs have no known length, an entry without a name has the iterations at which they have ended.
        """
        self.sync(name)
        events = [override._asdict() for override in self.overrides if override.name == name]
        return [*events, {"epoch_ends": list(self.epoch_ends)}] if self.epoch_ends else events

    def load_state_dict(self, events: Sequence[Mapping[str, Any]], name: str | None = None) -> None:
        """Load the results of `state_dict` for all hyperparameters, or for one; `refresh` then computes the values."""
        self.overrides = [] if name is None else [event for event in self.overrides if event.name != name]
        for event in events:
            if "epoch_ends" in event:
                self.epoch_ends = list(event["epoch_ends"])
            elif (override := Override(**event)) not in self.overrides:
                self.overrides.append(override)

    def unscheduled(self) -> list[dict[str, Any]]:
        """Return the values that were set by hand and have no schedule, JSON-serializable."""
        found = []
        for index, (base, group) in enumerate(zip(self._base, self.groups, strict=True)):
            for name, before in base.items():
                is_scheduled = name in self._values or (name == "betas" and "momentum" in self._values)
                if not is_scheduled and _is_value(now := group.get(name)) and now != before:
                    found.append(dict(group=index, name=name, value=list(now) if isinstance(now, tuple) else now))
        return found

    def load_unscheduled(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Set values as `unscheduled` returns them, unless they have a schedule by now."""
        for group, name, value in ((entry["group"], entry["name"], entry["value"]) for entry in values):
            if group < len(self.groups) and name in self.groups[group] and name not in self._values:
                self.groups[group][name] = tuple(value) if isinstance(value, list) else value


def _set(override: Override, value: Value) -> None:
    if override.is_muted:
        value.shown = override.value
    else:
        value.current, value.scale = override.value, override.scale


def _apply(latest: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, floors: np.ndarray) -> np.ndarray:
    """Return `a * value + b + c` after each step, at least the floor, float64[n, G].

    The order of the operations is that of a training run, so that the digits are the same.

    Args:
      latest: the values before, float64[G].
      a, b, c: what each step does, float64[n, 1] and float64[n, G].
      floors: the least value after each step, float64[n].
    """
    with np.errstate(all="ignore"):  # an illegal value is reported by its name
        has_floor, has_c = bool(np.isfinite(floors).any()), bool(c.any())
        if not b.any() and not has_c and not has_floor:
            return np.multiply.accumulate(np.concatenate([latest[None], np.broadcast_to(a, b.shape)]))[1:]
        values: list[Any] = []
        if len(latest) > _VECTOR:
            for x, y, z, least in zip(a, b, c, floors, strict=True):
                latest = latest * x + y
                latest = latest + z if has_c else latest
                values.append(np.maximum(latest, least) if has_floor else latest)
            return np.array(values)
        columns = []
        for value, x, ys, zs in zip(latest.tolist(), [a[:, 0].tolist()] * len(latest), b.T, c.T, strict=True):
            values = []
            if not has_c and not has_floor:
                for factor, y in zip(x, ys.tolist(), strict=True):
                    value = factor * value + y
                    values.append(value)
            else:
                for factor, y, z, least in zip(x, ys.tolist(), zs.tolist(), floors.tolist(), strict=True):
                    value = factor * value + y + z
                    value = least if value < least else value
                    values.append(value)
            columns.append(values)
        return np.array(columns).T


def _is_value(now: Any) -> bool:
    if isinstance(now, tuple):
        return all(map(is_host_number, now))
    return is_host_number(now) and not isinstance(now, bool)


def value_range(name: str) -> tuple[float, float]:
    """Return the least and the greatest legal value of a hyperparameter."""
    return _RANGES.get(name, (-_MAX, _MAX))


def legal_values(name: str) -> str:
    """Return the legal values of a hyperparameter in words."""
    if name not in _RANGES:
        return "finite"
    return "from 0 to 1" if name == "momentum" else "finite and at least 0"


def chain_of(optimizer: Any) -> ScheduleChain:
    """Return the schedules of an optimizer wrapper, which are created with the first one."""
    if getattr(optimizer, "schedule_chain", None) is None:
        optimizer.schedule_chain = ScheduleChain(optimizer)
    return optimizer.schedule_chain


def default_group(optimizer: Groups) -> Group | None:
    """Return the group with the optimizer's own settings; None if the object has no such group."""
    return getattr(optimizer, "base_param_settings", None)
