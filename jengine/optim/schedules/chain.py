"""Chain of the schedules of one optimizer: the value of each hyperparameter as a function of the
step.

MMEngine's schedules are a recursion: each step of a schedule changes the current value `v` to
`a * v + b * target + c * initial` (see `formulas`). The chain evaluates it from the values before
any schedule, in the order in which a training run does, so that the digits are the same. The
parameter groups only receive the result.

Two things besides the step change a value, and are kept as events: reductions on a plateau, and
values that are set by hand (`runner.set_lr`, `param_groups[i]['lr'] = ...`), of which the newest
counts. A value that is set replaces the current one, and the schedule goes on from it: what
multiplies the value multiplies the new one, and what sets it (optax, one-cycle, a restart) sets it
times new over old.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from jengine.config.annotations import is_host_number
from jengine.config.errors import ConfigError

Group: TypeAlias = MutableMapping[str, Any]  # a parameter group: host numbers by name
_MAX = 3.4028235e38  # of float32, the dtype of hyperparameters on the device
_CHUNK = 2**12  # steps computed at once
_VECTOR = 6  # so many groups are faster as an array, fewer as Python floats, one after the other
_ROUNDING = 1e-12  # a product of ratios may end just below 0
_RANGES = {
    "lr": (-_ROUNDING, _MAX),
    "weight_decay": (-_ROUNDING, _MAX),
    "momentum": (-_ROUNDING, 1 + _ROUNDING),
}


class Groups(Protocol):
    """The part of an optimizer wrapper that a scheduler uses.

    It may also have `base_param_settings`.
    """

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
    scale: float  # as in `Value`


class Value:
    """The value of one hyperparameter in one group.

    Attributes:
      current: what the schedules compute with.
      scale: multiplies what schedules set: new over old value, of those that were set by hand.
      written: what the group received: `current`, or 0 while a warm-up from 0 mutes it.
    """

    __slots__ = ("current", "scale", "written")

    def __init__(self, current: float) -> None:
        self.current = self.written = current
        self.scale = 1.0


# completed iterations and epochs, and the map from value and scale to new ones
Event: TypeAlias = tuple[int, int, Callable[[float, float], tuple[float, float]]]


class _Rows(NamedTuple):
    """Steps of some members, in the order of training."""

    times: np.ndarray  # float64[n]; an epoch ends half an iteration after its last one
    members: np.ndarray  # int64[n], positions in the chain
    steps: np.ndarray  # int64[n], of the member
    a: np.ndarray  # float64[n], see `Changes`
    b: np.ndarray
    c: np.ndarray


class _Curve(NamedTuple):
    """The values of a hyperparameter in one group."""

    times: np.ndarray  # float64[n]
    values: np.ndarray  # float64[1 + n], before any and after each time
    scale: float  # the last one


class ScheduleChain:
    """The schedules of one optimizer, in the order of the config.

    >>> from jengine.optim.optimizers.sgd import SGD
    >>> from jengine.optim.wrapper import OptimWrapper
    >>> from jengine.optim.schedules.scheduler_builder import build_param_schedulers
    >>> from jengine.optim.schedules.chain import chain_of
    >>> wrapper = OptimWrapper(SGD(lr=0.1))
    >>> cfg = dict(type="StepLR", step_size=2, gamma=0.5, by_epoch=False)
    >>> schedulers = build_param_schedulers(
    ...     cfg, wrapper, max_epochs=None, max_iters=6, epoch_length=None
    ... )
    >>> chain_of(wrapper).at(3)[0]["lr"], chain_of(wrapper).at(range(6))[0]["lr"].tolist()
    (0.05, [0.1, 0.1, 0.05, 0.05, 0.025, 0.025])

    Args:
      optimizer: the optimizer wrapper, or any object with `param_groups`.

    Attributes:
      members: the schedulers.
      epoch_length: iterations per epoch; None if unknown, then `epoch_ends` has the iteration at
        which each has ended.
      overrides: the values that were set by hand, by name and group.
    """

    def __init__(self, optimizer: Groups) -> None:
        self.optimizer = optimizer
        self.members: list[Any] = []  # `ParamScheduler`s, whose module imports this one
        self.epoch_length: int | None = None
        self.epoch_ends: list[int] = []
        self.overrides: dict[tuple[str, int], Override] = {}
        default = default_group(optimizer)
        # with several groups, the optimizer's own settings are one more group, so that multipliers
        # keep a reference
        self._separate = (
            None if any(group is default for group in optimizer.param_groups) else default
        )
        self._base: list[dict[str, Any]] = []  # the groups before any schedule
        # by name and group, of scheduled hyperparameters
        self._values: dict[str, list[Value | None]] = {}
        self._muting: dict[str, list[Any]] = {}
        self._mirrored = False
        self.rebase()

    @property
    def groups(self) -> Sequence[Group]:
        """The parameter groups, and the optimizer's own settings last if those are apart."""
        groups = self.optimizer.param_groups
        return groups if self._separate is None else [*groups, self._separate]

    def counts(self, name: str | None = None) -> tuple[int, int]:
        """Return the completed iterations and epochs, as the schedules of one value count them,
        or else all.
        """
        found = []
        for by_epoch in (False, True):
            members = [m for m in self.members if m.by_epoch is by_epoch]
            own = [m for m in members if m.param_name == name]
            found.append(max((m.global_step for m in own or members), default=0))
        return found[0], found[1]

    # --- Building ---

    def rebase(self, *, recorded: bool = True) -> None:
        """Take the current group settings as those before any schedule.

        With `recorded`, a group that has `initial_lr` has that rate before any schedule, as in
        MMEngine.
        """
        self._base = []
        for group in self.groups:
            initial = {key: group[key] for key in group if key.startswith("initial_")}
            base = {key: value for key, value in group.items() if key not in initial}
            if recorded:
                base |= {key.removeprefix("initial_"): value for key, value in initial.items()}
            self._base.append(base)

    def begin(self) -> None:
        """Remove all schedules, and return their values to those before.

        A value set by hand since stays.
        """
        for name, values in self._values.items():
            for index, value in enumerate(values):
                if value is not None and self._read(name, index) == value.written:
                    self._store(name, index, self._base[index][name])
                self.groups[index].pop(f"initial_{name}", None)
        self.members = []
        self.overrides = {}
        self.epoch_ends = []
        self._values = {}
        self.rebase()

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
        groups = self.groups
        initials = dict[str, list[float | None]]()
        for member in self.members:
            name = member.param_name
            if name not in initials:
                if member.mirrors_betas:
                    # MMEngine schedules `momentum`, which Adam does not have: the first beta
                    # follows it
                    for base, group in zip(self._base, groups, strict=True):
                        if "betas" in base:
                            base["momentum"] = float(base["betas"][0])
                            group.setdefault("momentum", base["momentum"])
                initials[name] = [
                    float(base[name]) if name in base else None for base in self._base
                ]
                if name not in self._values:
                    self._values[name] = [
                        None if value is None else Value(value) for value in initials[name]
                    ]
            # Some formulas start elsewhere (one-cycle), and so do later members then.
            initials[name] = list(member.bind(initials[name], groups))
        for name, values in initials.items():
            for group, value in zip(groups, values, strict=True):
                if value is not None:
                    group[f"initial_{name}"] = value
        # for `advance`, in which each look-up counts
        self._muting = {
            name: [m for m in self.members if m.param_name == name and m.muted_steps]
            for name in initials
        }
        self._mirrored = any(member.mirrors_betas for member in self.members)
        for m in self.members:
            cells = self._values[m.param_name]
            m.value_range = value_range(m.param_name)
            m.cells = [
                (i, groups[i], cells[i], m.targets[i], m.base_values[i])
                for i in sorted(m.scheduled)
            ]

    # --- Values at any step ---

    def at(self, step: int | Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return the scheduled hyperparameters of each group at a step, whatever the current one
        is.

        Args:
          step: completed iterations, one number or many. In a chain that counts epochs alone,
            without an epoch length, completed epochs.

        Returns:
          By group, and by name, a float; float64[n] for n steps. The optimizer's own settings are
          the last group if there are several.
        """
        steps = np.atleast_1d(
            np.asarray(step if isinstance(step, int | np.ndarray) else list(step), np.int64)
        )
        length = self._find_epoch_length()
        epochs = steps // length if length else np.searchsorted(self.epoch_ends, steps, "right")
        times = np.maximum(steps, self._epoch_times(epochs))
        found: dict[int, dict[str, Any]] = {index: {} for index in range(len(self.groups))}
        for name in self._values:
            for index, _, curve in self._curves(
                name, int(steps.max(initial=0)), int(epochs.max(initial=0))
            ):
                result = curve.values[np.searchsorted(curve.times, times, "right")]
                result[self._is_muted(name, index, (steps, epochs))] = 0.0
                value: Any = float(result[0]) if isinstance(step, int | np.integer) else result
                found[index][name] = value
        return found

    def check(self, iters: int, epochs: int) -> None:
        """Raise ConfigError if a value up to this step is outside the range of its
        hyperparameter.
        """
        for name in self._values:
            lowest, highest = value_range(name)
            for _, rows, curve in self._curves(name, iters, epochs):
                # no events before training, so that there is one for each row
                values = curve.values[1:]
                for i in np.flatnonzero(~((values >= lowest) & (values <= highest)))[:1]:
                    raise self.members[rows.members[i]].value_error(
                        float(values[i]), int(rows.steps[i])
                    )

    def refresh(self) -> None:
        """Compute the current values from the members' counters, and write them into the groups."""
        self._bind()
        for name in self._values:
            for index, _, curve in self._curves(name, *self.counts(name), only_last=True):
                value: Any = self._values[name][index]
                value.current = float(curve.values[-1])
                value.scale = curve.scale
                self._write(name, index, value)

    def _curves(
        self, name: str, iters: int, epochs: int, *, only_last: bool = False
    ) -> Iterator[tuple[int, _Rows, _Curve]]:
        """Yield each group, what the members do to it up to a step, and its values.

        With `only_last`, the values are the last one alone.
        """
        # Groups with the same members are computed together, and equal ones among them once.
        batches: dict[Sequence[int], dict[Any, list[int]]] = {}
        for index, value in enumerate(self._values[name]):
            if value is not None:
                positions = [
                    i
                    for i, m in enumerate(self.members)
                    if m.param_name == name and index in m.scheduled
                ]
                settings = [
                    (self.members[i].targets[index], self.members[i].base_values[index])
                    for i in positions
                ]
                new = self.overrides.get((name, index))
                key = (self._base[index][name], *settings, new and new._replace(group=0))
                batches.setdefault(tuple(positions), {}).setdefault(key, []).append(index)
        for members, groups in batches.items():
            rows = self._rows(members, iters, epochs, only_last)
            curves = self._trace(name, [same[0] for same in groups.values()], rows, only_last)
            for same, curve in zip(groups.values(), curves, strict=True):
                for index in same:
                    yield index, rows, curve

    def _rows(self, positions: Sequence[int], iters: int, epochs: int, only_last: bool) -> _Rows:
        """Return what the members at `positions` do up to a step."""
        parts = [(np.zeros(0), *[np.zeros(0, np.int64)] * 2, *[np.zeros(0)] * 3)]
        for i in positions:
            member = self.members[i]
            begin = math.ceil(member.begin)
            count = epochs if member.by_epoch else iters
            steps = np.arange(begin, min(count + 1, math.ceil(member.end)))
            if only_last and member.settings.sets_value:
                steps = steps[-1:]  # which hides those before
            if not len(steps):
                continue
            a, b, c = member.settings.changes(steps - begin, int(member.end - member.begin))
            used = (a != 1.0) | (b != 0.0) | (c != 0.0)
            steps = steps[used]
            times = self._epoch_times(steps) if member.by_epoch else steps.astype(np.float64)
            parts.append((times, np.full(len(steps), i), steps, a[used], b[used], c[used]))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        # in one iteration the members act in list order
        order = np.argsort(columns[0], kind="stable")
        return _Rows(*(column[order] for column in columns))

    def _trace(
        self, name: str, indices: Sequence[int], rows: _Rows, only_last: bool
    ) -> list[_Curve]:
        """Return the values of groups after each row and each event, which follows the rows of
        its time.
        """
        events = [
            (self._time(*at), column, act)
            for column, index in enumerate(indices)
            for *at, act in self._events(name, index)
        ]
        events.sort(key=lambda event: event[0])
        times = [event[0] for event in events]
        stops = np.searchsorted(rows.times, times, "right").tolist()
        targets = np.array([[m.targets[i] for i in indices] for m in self.members])
        initials = np.array([[m.base_values[i] or 0.0 for i in indices] for m in self.members])
        floors = np.array([m.floor for m in self.members])
        is_scale = np.array([m.settings.is_scale for m in self.members])
        value = np.array([float(self._base[i][name]) for i in indices])
        scale = np.ones(len(indices))
        parts = [value[None]]
        for first, stop, event in zip(
            [0, *stops], [*stops, len(rows.times)], [*events, None], strict=True
        ):
            for begin in range(first, stop, _CHUNK):
                part = slice(begin, min(begin + _CHUNK, stop))
                a = rows.a[part]
                members = rows.members[part]
                scales = (
                    scale * np.multiply.accumulate(np.where(is_scale[members], a, 1.0))[:, None]
                )
                y = rows.b[part, None] * targets.take(members, 0)
                z = rows.c[part, None] * initials.take(members, 0) if rows.c[part].any() else None
                if len(at := np.flatnonzero(a == 0.0)):  # what sets the value
                    y[at] *= scales[at]
                    if z is not None:
                        y[at] += z[at] * scales[at]
                        z[at] = 0.0
                    y[at] = np.maximum(y[at], floors[members[at], None])
                parts.append(_apply(value, a[:, None], y, z))
                value = parts[-1][-1]
                scale = scales[-1]
            if event is not None:
                _, column, act = event
                value = value.copy()
                scale = scale.copy()
                value[column], scale[column] = act(value[column].item(), scale[column].item())
                parts.append(value[None])
            if only_last:
                parts = [value[None]]
        all_times = np.insert(rows.times, stops, times)
        values = np.concatenate(parts)
        return [_Curve(all_times, *column) for column in zip(values.T, scale.tolist(), strict=True)]

    def _events(self, name: str, index: int) -> Iterator[Event]:
        """Yield what changes a group's value besides the steps."""
        for member in self.members:
            if member.param_name == name and index in member.scheduled:
                yield from member.events(index)
        if new := self.overrides.get((name, index)):
            yield new.iters, new.epochs, lambda value, scale: (new.value, new.scale)

    def _is_muted(self, name: str, index: int, counts: tuple[Any, Any] | None = None) -> Any:
        """Return whether a warm-up from 0 mutes a value, which a value that is set by hand ends.

        Args:
          counts: completed iterations and epochs, numbers or int64[n]; None for the members' own.
        """
        new = self.overrides.get((name, index))
        muted = False
        for m in self._muting[name]:
            now = m.global_step if counts is None else counts[m.by_epoch]
            first = math.ceil(m.begin)  # its iters or epochs
            since = -1 if new is None else new[m.by_epoch]
            muted |= (
                (first <= now) & (now < first + m.muted_steps) & ((since < first) | (now < since))
            )
        return muted

    def _find_epoch_length(self) -> int | None:
        """Return the iterations per epoch; if no member counts iterations, an epoch is one."""
        return self.epoch_length or (1 if all(member.by_epoch for member in self.members) else None)

    def _epoch_times(self, epochs: np.ndarray) -> np.ndarray:
        """Return the times at which epochs have ended, 0 for none.

        Unknown ends are after all iterations.
        """
        if length := self._find_epoch_length():
            return np.where(epochs > 0, epochs * length + 0.5, 0.0)
        known = [0.0, *(end + 0.5 for end in self.epoch_ends)]
        return np.array(
            [known[epoch] if epoch < len(known) else 1e15 + epoch for epoch in epochs.tolist()]
        )

    def _time(self, iters: int, epochs: int) -> float:
        return max(float(iters), float(self._epoch_times(np.array([epochs]))[0]))

    # --- Training ---

    def advance(self, member: Any) -> bool:
        """Apply the current step of a member to the current values.

        Return whether it may change them.
        """
        # A run calls this once per iteration and schedule: keep it short
        name = member.param_name
        a, b, c = member.change(member.last_step)
        muting = self._muting[name]
        if a == 1.0 and b == 0.0 and c == 0.0 and not muting:
            return False
        lowest, highest = member.value_range
        least = member.floor
        is_plain = not (muting or self._mirrored)
        is_scale = member.settings.is_scale
        for index, group, value, target, initial in member.cells:
            if a == 0.0:
                new = b * target * value.scale + c * initial * value.scale
            else:
                new = a * value.current + b * target + c * initial
            new = least if new < least else new
            if not lowest <= new <= highest:  # also NaN
                raise member.value_error(new, member.global_step)
            value.current = new
            if is_scale:
                value.scale *= a
            if is_plain:
                group[name] = value.written = new
            else:
                self._write(name, index, value)
        return True

    def end_epoch(self, epochs: int) -> None:
        """Record at which iteration an epoch has ended, if epochs have no known length."""
        if self._find_epoch_length() is None and len(self.epoch_ends) == epochs - 1:
            self.epoch_ends.append(self.counts()[0])

    def apply_event(self, member: Any) -> None:
        """Apply the newest event of a member, such as a reduction on a plateau."""
        for index, _, value, _, _ in member.cells:
            *_, (_, _, act) = member.events(index)
            value.current, value.scale = act(value.current, value.scale)
            self._write(member.param_name, index, value)

    def set_value(self, name: str, value: float) -> None:
        """Set a hyperparameter of the optimizer by hand.

        Each group gets its multiple, as before any schedule.
        """
        if not is_host_number(value):
            raise ConfigError(f"`{name}` must be a number, got {value!r}")
        if not all(name in base for base in self._base):
            raise ConfigError(
                f"`{name}` must be a known hyperparameter of the optimizer, got one without it"
            )
        reference = float(self._base[-1 if self._separate is not None else 0][name])
        for index, base in enumerate(self._base):
            self._store(name, index, float(value) * (base[name] / reference if reference else 1.0))

    def sync(self, name: str) -> None:
        """Take over the values of a scheduled hyperparameter that were set by hand since the
        last step.
        """
        for index, value in enumerate(self._values.get(name, ())):
            if value is None or (now := self._read(name, index)) == value.written:
                continue
            lowest, highest = value_range(name)
            if not is_host_number(now) or not lowest <= now <= highest:
                raise ConfigError(
                    f"`{name}` of a parameter group must be {legal_values(name)}, got {now!r}"
                )
            if value.current != 0.0:
                value.scale *= float(now) / value.current
            value.current = float(now)
            # In this iteration the schedules of other values may have stepped already
            self.overrides[name, index] = Override(
                *self.counts(name), name, index, value.current, value.scale
            )
            self._write(name, index, value)

    def _write(self, name: str, index: int, value: Value) -> None:
        value.written = 0.0 if self._is_muted(name, index) else value.current
        self._store(name, index, value.written)

    def _store(self, name: str, index: int, value: float) -> None:
        group = self.groups[index]
        group[name] = value
        if self._mirrored and name == "momentum" and "betas" in group:
            group["betas"] = (value, *group["betas"][1:])

    def _read(self, name: str, index: int) -> Any:
        group = self.groups[index]
        value = self._values[name][index]
        is_mirrored = self._mirrored and name == "momentum" and "betas" in group
        if is_mirrored and value is not None and group["betas"][0] != value.written:
            return group["betas"][0]
        return group[name]

    # --- Checkpoints ---

    def state_dict(self, name: str) -> list[dict[str, Any]]:
        """Return the values of a scheduled hyperparameter that were set by hand, JSON-serializable.

        Where epochs have no known length, an entry without a name has the iterations at which they
        have ended.
        """
        self.sync(name)
        events = [
            override._asdict() for override in self.overrides.values() if override.name == name
        ]
        return [*events, {"epoch_ends": list(self.epoch_ends)}] if self.epoch_ends else events

    def load_state_dict(self, events: Iterable[Mapping[str, Any]], name: str | None = None) -> None:
        """Load the results of `state_dict` for all hyperparameters, or for one.

        `refresh` then computes the values.
        """
        self.overrides = {
            key: old for key, old in self.overrides.items() if name not in (None, old.name)
        }
        for event in events:
            if "epoch_ends" in event:
                self.epoch_ends = list(event["epoch_ends"])
            else:
                self.overrides[event["name"], event["group"]] = Override(**event)

    def unscheduled(self) -> list[dict[str, Any]]:
        """Return the values that were set by hand and have no schedule, JSON-serializable."""
        found = []
        for index, (base, group) in enumerate(zip(self._base, self.groups, strict=True)):
            for name, before in base.items():
                is_scheduled = name in self._values or (
                    name == "betas" and "momentum" in self._values
                )
                if not is_scheduled and _is_value(now := group.get(name)) and now != before:
                    found.append(
                        dict(
                            group=index,
                            name=name,
                            value=list(now) if isinstance(now, tuple) else now,
                        )
                    )
        return found

    def load_unscheduled(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Set values as `unscheduled` returns them, unless they have a schedule by now."""
        for group, name, value in (
            (entry["group"], entry["name"], entry["value"]) for entry in values
        ):
            if group < len(self.groups) and name in self.groups[group] and name not in self._values:
                self.groups[group][name] = tuple(value) if isinstance(value, list) else value


def _apply(value: np.ndarray, a: np.ndarray, y: np.ndarray, z: np.ndarray | None) -> np.ndarray:
    """Return the values after each step `a * value + y + z`, float64[n, G].

    The order of the operations is that of a training run, so that the digits are the same.

    Args:
      value: the values before, float64[G].
      a: float64[n, 1].
      y, z: float64[n, G]; None for zeros.
    """
    values = np.empty_like(y)
    with np.errstate(all="ignore"):  # an illegal value is reported by its name
        if len(value) < _VECTOR:
            z = np.zeros_like(y) if z is None else z
            steps = a[:, 0].tolist()
            for column, now in enumerate(value.tolist()):
                terms = zip(steps, y[:, column].tolist(), z[:, column].tolist(), strict=True)
                values[:, column] = [now := x * now + more + last for x, more, last in terms]
            return values
        values[:] = a
        for row, more, last in zip(
            values, y, itertools.repeat(None) if z is None else z, strict=False
        ):
            row *= value
            row += more
            if last is not None:
                row += last
            value = row
    return values


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
