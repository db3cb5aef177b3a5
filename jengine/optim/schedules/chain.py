"""Chain of the schedules of one optimizer: the value of each hyperparameter as a function of the
step.

MMEngine's schedules are a recursion: each step of a schedule changes the current value `v` to
`a * v + b * target + c * initial` (see `formulas`). The chain evaluates it from the values before
any schedule, in the order in which a training run does, so that the digits are the same, and for
many iterations at once. The parameter groups only receive the result.

A value that is set by hand (`runner.set_lr`, `param_groups[i]['lr'] = ...`) multiplies what the
schedules give from then on by new over old. Where the old one is 0, the new one takes its place,
and then that of the initial value. The newest counts.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from jengine.config.annotations import is_host_number
from jengine.config.errors import ConfigError

Group: TypeAlias = MutableMapping[str, Any]  # a parameter group: host numbers by name
_MAX = 3.4028235e38  # of float32, the dtype of hyperparameters on the device
_CHUNK = 2**12  # steps computed at once
_TINY = 1e-100  # what is smaller is 0 on the device, see `formulas.OFF`
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
    initial: float  # the value before any schedule
    reference: float  # what the schedules gave then

    def apply(self, scheduled: Any) -> Any:
        """Return the value, or float64[n], in the place of what the schedules give."""
        ratio = scheduled / (self.reference or self.initial or 1.0)
        # in the place of a 0, the value stays until the schedules give another
        return self.value * (ratio if self.reference else ratio + (ratio == 0.0))


class _Rows(NamedTuple):
    """Steps of some members, in the order of training."""

    times: np.ndarray  # float64[n]; an epoch ends half an iteration after its last one
    members: np.ndarray  # int64[n], positions in the track
    steps: np.ndarray  # int64[n], of the member; -1 for a reduction on a plateau
    a: np.ndarray  # float64[n], see `Changes`
    b: np.ndarray
    c: np.ndarray


class _Track:
    """The schedules of one hyperparameter, and its values from the current iteration on.

    Attributes:
      members: the schedulers.
      indices, groups: the groups that have the hyperparameter.
      base: float64[G], the values before any schedule.
      scheduled: bool[M, G], which member changes which group.
      targets, initials, floors: float64[M, G], without effect where a member changes nothing.
      iters, epochs: completed ones.
      first: the iteration of the first row in `exact`.
      exact: float64[n, G], the values after `first` and the iterations that follow it.
      values: the same, as lists, and 0 for what is 0 on the device.
      written: what the groups have received.
    """

    def __init__(
        self, name: str, members: Sequence[Any], bases: Sequence[Any], groups: Sequence[Group]
    ) -> None:
        self.name = name
        self.members = members
        self.indices = [i for i, base in enumerate(bases) if name in base]
        self.groups = [groups[i] for i in self.indices]
        self.base = np.array([float(bases[i][name]) for i in self.indices])
        self.range = value_range(name)
        self.written: list[float] = []

        rows = [
            (np.isin(self.indices, m.scheduled), m.targets, m.base_values, m.settings.floor())
            for m in members
        ]
        self.scheduled, targets, initials, floors = map(np.array, zip(*rows, strict=True))
        self.targets = np.where(self.scheduled, targets[:, self.indices], 0.0)
        self.initials = np.where(self.scheduled, initials[:, self.indices], 0.0)
        self.floors = np.where(self.scheduled, floors[:, None], -math.inf)
        self.iters = max([0, *[m.global_step for m in members if not m.by_epoch]])
        self.epochs = max([0, *[m.global_step for m in members if m.by_epoch]])

    def start(self, values: np.ndarray) -> None:
        """Set the values from the current iteration on, float64[n, G]."""
        self.first = self.iters
        self.exact = values
        self.values = np.where(abs(values) < _TINY, 0.0, values).tolist()


class ScheduleChain:
    """The schedules of one optimizer, in the order of the config.

    They advance together: where two count iterations, the first that steps counts for both.

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
      lr_factor: multiplies every learning rate after n iterations, see `auto_scale_lr`; None for 1.
    """

    def __init__(self, optimizer: Groups) -> None:
        self.optimizer = optimizer
        self.members: list[Any] = []  # `ParamScheduler`s, whose module imports this one
        self.epoch_length: int | None = None
        self.epoch_ends: list[int] = []
        self.overrides: dict[tuple[str, int], Override] = {}
        self.lr_factor: Callable[[int], float] | None = None
        default = default_group(optimizer)
        # with several groups, the optimizer's own settings are one more group, so that multipliers
        # keep a reference
        self._separate = (
            None if any(group is default for group in optimizer.param_groups) else default
        )
        self._tracks: dict[str, _Track] = {}
        self._base: list[dict[str, Any]] = []  # the groups before any schedule
        self._rebase()

    @property
    def groups(self) -> Sequence[Group]:
        """The parameter groups, and the optimizer's own settings last if those are apart."""
        groups = self.optimizer.param_groups
        return groups if self._separate is None else [*groups, self._separate]

    # --- Building ---

    def _rebase(self) -> None:
        """Take the group settings as those before any schedule, with `initial_lr` for `lr`."""
        self._base = [
            {
                **{name: now for name, now in group.items() if not name.startswith("initial_")},
                **{
                    name.removeprefix("initial_"): now
                    for name, now in group.items()
                    if name.startswith("initial_")
                },
            }
            for group in self.groups
        ]

    def begin(self) -> None:
        """Remove all schedules, and return their values to those before.

        A value set by hand since stays.
        """
        for name, track in self._tracks.items():
            for column, index in enumerate(track.indices):
                if self._read(track, column) == track.written[column]:
                    track.groups[column][name] = self._base[index][name]
                    if name == "momentum":
                        _mirror(track.groups[column])
                track.groups[column].pop(f"initial_{name}", None)
        self.members = []
        self.overrides = {}
        self.epoch_ends = []
        self._tracks = {}
        self._rebase()

    def add(self, member: Any) -> None:
        """Append a member, and set the values with it."""
        self.members.append(member)
        try:
            self.refresh()
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
                    for base in self._base:
                        if "betas" in base:
                            base["momentum"] = float(base["betas"][0])
                initials[name] = [
                    float(base[name]) if name in base else None for base in self._base
                ]
            # Some formulas start elsewhere (one-cycle), and so do later members then.
            initials[name] = list(member.bind(initials[name], groups))
        for name, values in initials.items():
            members = [member for member in self.members if member.param_name == name]
            self._tracks[name] = _Track(name, members, self._base, groups)
            for group, value in zip(groups, values, strict=True):
                if value is not None:
                    group[f"initial_{name}"] = value

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
        for name, track in self._tracks.items():
            rows, curve = self._replay(track, int(steps.max(initial=0)), int(epochs.max(initial=0)))
            curve = curve[np.searchsorted(rows.times, times, "right")]
            curve = np.where(abs(curve) < _TINY, 0.0, curve)
            if self.lr_factor is not None:
                curve *= np.array([[self._factor(name, at)] for at in steps.tolist()])
            for column, index in enumerate(track.indices):
                values = curve[:, column]
                if new := self.overrides.get((name, index)):
                    is_later = (steps >= new.iters) & (epochs >= new.epochs)
                    values = np.where(is_later, new.apply(values), values)
                is_one = isinstance(step, int | np.integer)
                found[index][name] = float(values[0]) if is_one else values
        return found

    def check(self, iters: int, epochs: int) -> None:
        """Raise ConfigError if a value up to this step is outside the range of its
        hyperparameter.
        """
        for track in self._tracks.values():
            lowest, highest = track.range
            rows, curve = self._replay(track, iters, epochs)
            values = curve[1:]
            for i, column in np.argwhere(~((values >= lowest) & (values <= highest)))[:1]:
                member = track.members[rows.members[i]]
                raise member.value_error(float(values[i, column]), int(rows.steps[i]))

    def refresh(self) -> None:
        """Compute the current values from the members' counters, and write them into the groups."""
        self._bind()
        for name, track in self._tracks.items():
            for key, new in self.overrides.items():
                if key[0] == name and new.group in track.indices:
                    column = track.indices.index(new.group)
                    _, curve = self._replay(track, new.iters, new.epochs, only_last=True)
                    then = float(curve[-1, column]) * self._factor(name, new.iters)
                    self.overrides[key] = new._replace(
                        initial=float(track.base[column]),
                        reference=0.0 if abs(then) < _TINY else then,
                    )
            _, curve = self._replay(track, track.iters, track.epochs, only_last=True)
            track.start(curve)
            self._write(track, track.values[0], track.members[-1])

    def _factor(self, name: str, iters: int) -> float:
        return 1.0 if self.lr_factor is None or name != "lr" else self.lr_factor(iters)

    def _replay(
        self, track: _Track, iters: int, epochs: int, *, only_last: bool = False
    ) -> tuple[_Rows, np.ndarray]:
        """Return all steps up to a position, and the values before them and after each."""
        rows = self._rows(track, range(iters + 1), range(epochs + 1))
        return rows, _trace(track, track.base, rows, only_last=only_last)

    def _rows(self, track: _Track, iters: range, epochs: range) -> _Rows:
        """Return what the members do at these counts; from 0 on, with the reductions so far."""
        parts = [(np.zeros(0), *[np.zeros(0, np.int64)] * 2, *[np.zeros(0)] * 3)]
        for i, member in enumerate(track.members):
            begin = math.ceil(member.begin)
            counts = epochs if member.by_epoch else iters
            steps = np.arange(max(counts.start, begin), min(counts.stop, math.ceil(member.end)))
            if len(steps):
                changes = member.settings.changes(steps - begin, int(member.end - member.begin))
                used = (changes[0] != 1.0) | (changes[1] != 0.0) | (changes[2] != 0.0)
                steps = steps[used]
                times = self._epoch_times(steps) if member.by_epoch else steps.astype(np.float64)
                parts.append((times, np.full(len(steps), i), steps, *np.array(changes)[:, used]))
            if counts.start == 0 and member.reductions:
                at = np.array(member.reductions)
                # after what is scheduled for the same time
                times = np.maximum(at[:, 0], self._epoch_times(at[:, 1])) + 0.25
                one = np.ones(len(at))
                parts.append((times, np.full(len(at), i), -np.ones(len(at), int), one, one, one))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        # in one iteration the members act in list order
        order = np.argsort(columns[0], kind="stable")
        return _Rows(*[column[order] for column in columns])

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

    # --- Training ---

    def advance(self, member: Any) -> None:
        """Set the values for the counter of a member, which has just counted.

        Raises:
          ConfigError: a value is outside the range of its hyperparameter; the groups keep the last.
        """
        # A run calls this once per iteration and schedule: keep it short
        track = self._tracks[member.param_name]
        count = member.global_step
        if count <= (track.epochs if member.by_epoch else track.iters):
            return  # another member has counted it
        for group, value in zip(track.groups, track.written, strict=True):
            if group[track.name] != value or track.name == "momentum":
                self.sync(track.name)  # someone has set the value, before this step
                break
        if member.by_epoch:
            now = track.exact[track.iters - track.first]
            if self._find_epoch_length() is None and len(self.epoch_ends) == count - 1:
                self.epoch_ends.append(max(each.iters for each in self._tracks.values()))
            nothing = range(1, 1)
            rows = self._rows(track, nothing, range(track.epochs + 1, count + 1))
            track.epochs = count
            track.start(_trace(track, now, rows, only_last=True))
            self._write(track, track.values[0], member)
            return
        if count - track.first >= len(track.values):
            self._extend(track, count)
        track.iters = count
        self._write(track, track.values[count - track.first], member)

    def _extend(self, track: _Track, count: int) -> None:
        """Compute the values of the iterations from `count` on."""
        size = min(member.settings.block for member in track.members)
        iters = np.arange(track.iters, count + size)
        rows = self._rows(track, range(track.iters + 1, count + size), range(1, 1))
        values = _trace(track, track.exact[track.iters - track.first], rows)
        track.start(values[np.searchsorted(rows.times, iters, "right")])

    def reduce(self, member: Any) -> None:
        """Apply the newest reduction of a member that follows a metric."""
        track = self._tracks[member.param_name]
        now = track.exact[track.iters - track.first]
        track.start(_reduce(track, member, now)[None])
        self._write(track, track.values[0], member)

    def counts(self) -> tuple[int, int]:
        """Return the completed iterations and epochs."""
        tracks = self._tracks.values()
        return max(track.iters for track in tracks), max(track.epochs for track in tracks)

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
        for group, base in zip(self.groups, self._base, strict=True):
            group[name] = float(value) * (base[name] / reference if reference else 1.0)
            if name == "momentum":
                _mirror(group)

    def sync(self, name: str) -> None:
        """Take over the values of a hyperparameter that were set by hand since the last step."""
        track = self._tracks[name]
        lowest, highest = track.range
        scheduled = track.values[track.iters - track.first]
        for column, index in enumerate(track.indices):
            value = self._read(track, column)
            if value == track.written[column]:
                continue
            if not is_host_number(value) or not lowest <= value <= highest:
                raise ConfigError(
                    f"`{name}` of a parameter group must be {legal_values(name)}, got {value!r}"
                )
            self.overrides[name, index] = Override(
                *(track.iters, track.epochs, name, index, float(value)),
                initial=float(track.base[column]),
                reference=scheduled[column] * self._factor(name, track.iters),
            )
            self._write(track, scheduled, track.members[0])

    def _write(self, track: _Track, values: list[float], member: Any) -> None:
        name = track.name
        if self.overrides or self.lr_factor is not None:
            factor = self._factor(name, track.iters)
            values = [value * factor for value in values]
            for column, index in enumerate(track.indices):
                if new := self.overrides.get((name, index)):
                    values[column] = new.apply(values[column])
        lowest, highest = track.range
        for group, value in zip(track.groups, values, strict=True):
            if not lowest <= value <= highest:  # also NaN
                raise member.value_error(value, member.global_step)
            group[name] = value
            if name == "momentum":
                _mirror(group)
        track.written = values

    def _read(self, track: _Track, column: int) -> Any:
        """Return the current value of a group; for the momentum, the first beta if that was set."""
        group = track.groups[column]
        betas = group.get("betas", ())[:1]
        if track.name == "momentum" and betas and betas[0] != track.written[column]:
            return betas[0]
        return group[track.name]

    # --- Checkpoints ---

    def state_dict(self, name: str) -> list[dict[str, Any]]:
        """Return the values of a scheduled hyperparameter that were set by hand, JSON-serializable.

        Where epochs have no known length, an entry without a name has the iterations at which they
        have ended.
        """
        self.sync(name)
        events: list[dict[str, Any]] = [
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
                now = group.get(name)
                is_scheduled = name in self._tracks or (
                    name == "betas" and "momentum" in self._tracks
                )
                if not is_scheduled and _is_value(now) and now != before:
                    value = list(now) if isinstance(now, tuple) else now
                    found.append({"group": index, "name": name, "value": value})
        return found

    def load_unscheduled(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Set values as `unscheduled` returns them, unless they have a schedule by now."""
        for group, name, value in (
            (entry["group"], entry["name"], entry["value"]) for entry in values
        ):
            if group < len(self.groups) and name in self.groups[group] and name not in self._tracks:
                self.groups[group][name] = tuple(value) if isinstance(value, list) else value


def _trace(track: _Track, value: np.ndarray, rows: _Rows, *, only_last: bool = False) -> np.ndarray:
    """Return the values before the rows, which are given, and after each, float64[1 + n, G].

    With `only_last`, float64[1, G] after all of them.
    """
    parts = [value[None]]
    reductions = np.flatnonzero(rows.steps < 0)
    count = len(rows.times)
    cuts = np.unique([*range(0, count, _CHUNK), *reductions, *(reductions + 1), count])
    for first, stop in itertools.pairwise(cuts.tolist()):
        part = slice(first, stop)
        members = rows.members[part]
        if rows.steps[first] < 0:
            parts.append(_reduce(track, track.members[members[0]], value)[None])
        else:
            a = rows.a[part, None]
            if not track.scheduled.all():
                a = np.where(track.scheduled[members], a, 1.0)
            y = rows.b[part, None] * track.targets[members]
            z = rows.c[part, None] * track.initials[members]
            at = np.flatnonzero(rows.a[part] == 0.0)  # what sets the value
            y[at] = np.maximum(y[at] + z[at], track.floors[members[at]])
            z[at] = 0.0
            parts.append(_apply(value, a, y, z))
        value = parts[-1][-1]
        if only_last:
            parts = [value[None]]
    return np.concatenate(parts)


def _reduce(track: _Track, member: Any, value: np.ndarray) -> np.ndarray:
    """Return the values after a reduction on a plateau."""
    row = track.members.index(member)
    reduced = np.maximum(value * member.settings.factor, track.targets[row])
    # As in PyTorch: a reduction too small to matter is not applied.
    is_used = track.scheduled[row] & (value - reduced > member.settings.eps)
    return np.where(is_used, reduced, value)


def _apply(value: np.ndarray, a: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return the values after each step `a * value + y + z`, float64[n, G].

    Args:
      value: the values before, float64[G].
      a: float64[n, 1] or [n, G].
      y, z: float64[n, G].
    """
    values = np.empty_like(y)
    for column, now in enumerate(value.tolist()):  # Python's floats: short rows are slow in NumPy
        factors = a[:, column % a.shape[1]].tolist()
        terms = zip(factors, y[:, column].tolist(), z[:, column].tolist(), strict=True)
        values[:, column] = [now := x * now + more + last for x, more, last in terms]
    return values


def _mirror(group: Group) -> None:
    """Set the first beta to the momentum."""
    if "betas" in group:
        group["betas"] = (group["momentum"], *group["betas"][1:])


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
