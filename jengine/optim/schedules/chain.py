"""Chain of the schedules of one optimizer: the value of each hyperparameter as a function of the
step.

MMEngine's schedules are a recursion: each step of a schedule changes the current value `v` to
`a * v + b * target + c * initial` (see `formulas`). The chain evaluates it from the values before
any schedule, in the order in which a training run does, so that the digits are the same, and for
many iterations at once. The parameter groups only receive the result.

A value that is set by hand (`runner.set_lr`, `param_groups[i]['lr'] = ...`) multiplies what the
schedules give from then on by new over old. Where the old one is 0, the new one takes its place,
and then that of the initial value. The newest counts. A reduction on a plateau is such a value.
"""

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from jengine.config.annotations import is_host_number
from jengine.config.errors import ConfigError

T = TypeVar("T")
Group: TypeAlias = MutableMapping[str, Any]  # a parameter group: host numbers by name
_MAX = 3.4028235e38  # of float32, the dtype of hyperparameters on the device
_CHUNK = 2**12  # steps computed at once
_TINY = 1e-100  # what is smaller is 0 on the device, see `formulas.OFF`
_ROUNDING = 1e-12  # a product of ratios may end just below 0
_RATES = (-_ROUNDING, _MAX, "finite and at least 0")
_RANGES = {
    "lr": _RATES,
    "weight_decay": _RATES,
    "momentum": (-_ROUNDING, 1 + _ROUNDING, "from 0 to 1"),
}


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
    a: np.ndarray  # float64[n], see `Changes`
    b: np.ndarray
    c: np.ndarray


class _Track:
    """The schedules of one hyperparameter, and its values from the current iteration on.

    Attributes:
      members: the schedulers.
      groups: the groups that have the hyperparameter, by index.
      base: float64[G], the values before any schedule, 0 for a group without the hyperparameter.
      scheduled: bool[M, G], which member changes which group.
      targets, initials, floors: float64[M, G], without effect where a member changes nothing.
      iters, epochs: completed ones; -1 before the first values.
      first: the iteration of the first row in `exact`.
      exact: float64[n, G], the values after `first` and the iterations that follow it.
      values: the same, as lists, and 0 for what is 0 on the device.
      written: what the groups have received.
    """

    def __init__(
        self, name: str, members: Sequence[Any], base: Sequence[float], groups: Mapping[int, Group]
    ) -> None:
        self.name = name
        self.members = members
        self.groups = groups
        self.base = np.array(base)
        self.range = value_range(name)
        self.written: list[float] = []
        self.scheduled = np.array([m.scheduled for m in members])
        self.targets = np.where(self.scheduled, [m.targets for m in members], 0.0)
        self.initials = np.where(self.scheduled, [m.base_values for m in members], 0.0)
        floors = [[member.settings.floor()] for member in members]
        self.floors = np.where(self.scheduled, floors, -math.inf)
        self.set(-1, -1, self.base[None])

    def set(self, iters: int, epochs: int, exact: np.ndarray) -> None:
        """Set the position, and the values from it on, float64[n, G]."""
        self.iters = self.first = iters
        self.epochs = epochs
        self.exact = exact
        self.values = np.where(abs(exact) < _TINY, 0.0, exact).tolist()


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
      optimizer: the optimizer wrapper, or any object with `param_groups`, mappings of host numbers
        by name (`lr`, `momentum`, ...); it may also have `base_param_settings`.

    Attributes:
      members: the schedulers.
      epoch_length: iterations per epoch; None if unknown, then `epoch_ends` has the iteration at
        which each has ended.
      overrides: the values that were set by hand, by name and group.
      lr_factor: multiplies every learning rate after n iterations, see `auto_scale_lr`; None for 1.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.epoch_length: int | None = None
        self.lr_factor: Callable[[int], float] | None = None
        default = getattr(optimizer, "base_param_settings", None)
        # with several groups, the optimizer's own settings are one more group, so that multipliers
        # keep a reference
        is_apart = all(group is not default for group in optimizer.param_groups)
        self._separate: Group | None = default if is_apart else None
        self._tracks: dict[str, _Track] = {}
        self.begin()
        self._is_begun = False

    @property
    def groups(self) -> Sequence[Group]:
        """The parameter groups, and the optimizer's own settings last if those are apart."""
        groups = self.optimizer.param_groups
        return groups if self._separate is None else [*groups, self._separate]

    # --- Building ---

    def begin(self) -> None:
        """Remove all schedules, and return their values to those before.

        A value set by hand since stays. Schedules that are added next act from `refresh` on.
        """
        for name, track in self._tracks.items():
            for index, group in track.groups.items():
                if self._read(track, index) == track.written[index]:
                    group[name] = self._base[index][name]
                    if name == "momentum":
                        _mirror(group)
                group.pop(f"initial_{name}", None)
        self.members: list[Any] = []  # `ParamScheduler`s, whose module imports this one
        self.overrides: dict[tuple[str, int], Override] = {}
        self.epoch_ends: list[int] = []
        self._tracks = {}
        self._base: list[dict[str, Any]] = []  # the groups before any schedule
        for group in self.groups:
            # `initial_lr` comes last, as it replaces `lr`
            items = sorted(group.items(), key=lambda item: item[0].startswith("initial_"))
            self._base.append({name.removeprefix("initial_"): now for name, now in items})
        self._is_begun = True

    def add(self, member: Any) -> None:
        """Append a member, and set the values with it."""
        self.members.append(member)
        if self._is_begun:
            return
        try:
            self.refresh()
        except Exception:
            self.members.pop()
            raise

    def _bind(self, name: str) -> _Track:
        """Bind the members for a hyperparameter to the values from which they start."""
        members = [member for member in self.members if member.param_name == name]
        if members[0].mirrors_betas:
            # MMEngine schedules `momentum`, which Adam does not have: the first beta follows it
            for base in self._base:
                if "betas" in base:
                    base["momentum"] = float(base["betas"][0])
        groups = dict(enumerate(self.groups))
        groups = {index: group for index, group in groups.items() if name in self._base[index]}
        initials = bases = [float(base.get(name, 0.0)) for base in self._base]
        # The optimizer's own settings are the last group: their initial value has no multiplier.
        reference = max(groups) if self._separate is not None else min(groups)
        for member in members:
            # Some formulas start elsewhere (one-cycle), and so do later members then.
            initials = member.bind(initials, initials[reference], groups)
        for index, group in groups.items():
            group[f"initial_{name}"] = initials[index]
        return _Track(name, members, bases, groups)

    # --- Values at any step ---

    def at(self, step: int | Sequence[int] | np.ndarray) -> dict[int, dict[str, Any]]:
        """Return the scheduled hyperparameters of each group at a step, whatever the current one
        is.

        Args:
          step: completed iterations, one number or many. In a chain that counts epochs alone,
            without an epoch length, completed epochs.

        Returns:
          By group, and by name, a float; float64[n] for n steps. The optimizer's own settings are
          the last group if there are several.
        """
        steps = np.atleast_1d(np.asarray(step, np.int64))
        length = self._find_epoch_length()
        epochs = steps // length if length else np.searchsorted(self.epoch_ends, steps, "right")
        times = np.maximum(steps, self._epoch_times(epochs))
        found: dict[int, dict[str, Any]] = {index: {} for index in range(len(self.groups))}
        for name, track in self._tracks.items():
            rows = self._rows(track, range(steps.max() + 1), range(epochs.max() + 1))
            curve = np.concatenate([*_trace(track, track.base, rows)])
            curve = curve[np.searchsorted(rows.times, times, "right")]
            curve = np.where(abs(curve) < _TINY, 0.0, curve)
            if self.lr_factor is not None:
                curve *= np.array([[self._factor(name, at)] for at in steps.tolist()])
            for index in track.groups:
                values = curve[:, index]
                if new := self.overrides.get((name, index)):
                    is_later = (steps >= new.iters) & (epochs >= new.epochs)
                    values = np.where(is_later, new.apply(values), values)
                found[index][name] = values if np.ndim(step) else float(values[0])
        return found

    def refresh(self) -> None:
        """Compute the current values from the members' counters, and write them into the groups."""
        self._is_begun = False
        for name in dict.fromkeys(member.param_name for member in self.members):
            track = self._tracks[name] = self._bind(name)
            for key, new in self.overrides.items():
                if key[0] == name and new.group in track.groups:
                    then = self._compute(track, new.iters, new.epochs)[0, new.group]
                    then = float(then) * self._factor(name, new.iters)
                    self.overrides[key] = new._replace(
                        initial=float(track.base[new.group]),
                        reference=0.0 if abs(then) < _TINY else then,
                    )
            iters, epochs = (
                max([0, *(m.global_step for m in track.members if m.by_epoch is unit)])
                for unit in (False, True)
            )
            track.set(iters, epochs, self._compute(track, iters, epochs))
            self._write(track, track.members[-1])

    def _factor(self, name: str, iters: int) -> float:
        return 1.0 if self.lr_factor is None or name != "lr" else self.lr_factor(iters)

    def _compute(self, track: _Track, iters: int, epochs: int, ahead: int = 0) -> np.ndarray:
        """Return the values at a later position, and in `ahead` iterations that follow it,
        float64[1 + ahead, G].
        """
        rows = self._rows(
            track,
            range(track.iters + 1, iters + ahead + 1),
            range(track.epochs + 1, epochs + 1),
        )
        values = _trace(track, track.exact[track.iters - track.first], rows)
        if not ahead:
            return collections.deque(values, maxlen=1)[0][-1:]
        steps = np.arange(iters, iters + ahead + 1)
        return np.concatenate([*values])[np.searchsorted(rows.times, steps, "right")]

    def _rows(self, track: _Track, iters: range, epochs: range) -> _Rows:
        """Return what the members do at these counts."""
        parts = [(np.zeros(0), np.zeros(0, np.int64), *[np.zeros(0)] * 3)]
        for i, member in enumerate(track.members):
            begin = math.ceil(member.begin)
            counts = epochs if member.by_epoch else iters
            steps = np.arange(max(counts.start, begin), min(counts.stop, math.ceil(member.end)))
            if len(steps):
                a, b, c = member.settings.changes(steps - begin, int(member.end - member.begin))
                used = (a != 1.0) | (b != 0.0) | (c != 0.0)
                steps = steps[used]
                times = self._epoch_times(steps) if member.by_epoch else steps.astype(np.float64)
                parts.append((times, np.full(len(steps), i), *(x[used] for x in (a, b, c))))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        # in one iteration the members act in list order
        order = np.argsort(columns[0], kind="stable")
        return _Rows(*(column[order] for column in columns))

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
        for index, group in track.groups.items():
            if group[track.name] != track.written[index] or track.name == "momentum":
                self.sync(track.name)  # someone has set the value, before this step
                break
        if member.by_epoch:
            if self._find_epoch_length() is None and len(self.epoch_ends) == count - 1:
                self.epoch_ends.append(max(each.iters for each in self._tracks.values()))
            track.set(track.iters, count, self._compute(track, track.iters, count))
        elif count - track.first < len(track.values):
            track.iters = count
        else:
            ahead = min(each.settings.block for each in track.members) - 1
            track.set(count, track.epochs, self._compute(track, count, track.epochs, ahead))
        self._write(track, member)

    def read_ahead(self, count: int, read: Callable[[], T]) -> list[T]:
        """Return what `read` returns now and in the iterations that follow, up to `count`, as far
        as the values are computed.

        Afterwards the groups are as before.
        """
        # epochs may end at any time
        tracks = [
            track
            for track in self._tracks.values()
            if not all(member.by_epoch for member in track.members)
        ]
        known = [track.first + len(track.values) - track.iters for track in tracks] or [1]
        states = [(track.iters, track.written) for track in tracks]
        groups = [dict(group) for group in self.groups]
        found = [read()]
        try:
            for _ in range(1, min(count, *known)):
                for track in tracks:
                    track.iters += 1
                    self._write(track, track.members[0])
                found.append(read())
        except ValueError:  # which that iteration raises too
            pass
        finally:
            for track, (iters, written) in zip(tracks, states, strict=True):
                track.iters = iters
                track.written = written
            for group, values in zip(self.groups, groups, strict=True):
                group.update(values)
        return found

    def set_value(self, name: str, value: float) -> None:
        """Set a hyperparameter of the optimizer by hand.

        Each group gets its multiple, as before any schedule.
        """
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
        lowest, highest, legal = track.range
        scheduled = track.values[track.iters - track.first]
        for index in track.groups:
            value = self._read(track, index)
            if value == track.written[index]:
                continue
            if not is_host_number(value) or not lowest <= value <= highest:
                raise ConfigError(f"`{name}` of a parameter group must be {legal}, got {value!r}")
            self.overrides[name, index] = Override(
                *(track.iters, track.epochs, name, index, float(value)),
                initial=float(track.base[index]),
                reference=scheduled[index] * self._factor(name, track.iters),
            )
        self._write(track, track.members[0])

    def _write(self, track: _Track, member: Any) -> None:
        name = track.name
        values = track.values[track.iters - track.first]
        if self.overrides or self.lr_factor is not None:
            factor = self._factor(name, track.iters)
            values = [value * factor for value in values]
            for index in track.groups:
                if new := self.overrides.get((name, index)):
                    values[index] = new.apply(values[index])
        lowest, highest, legal = track.range
        for index, group in track.groups.items():
            value = values[index]
            if not lowest <= value <= highest:  # also NaN
                raise ConfigError(
                    f"`{name}` must be {legal}, got {value:g} from {type(member).__name__} in "
                    f"{'epoch' if member.by_epoch else 'iteration'} {member.global_step + 1}"
                )
            group[name] = value
            if name == "momentum":
                _mirror(group)
        track.written = values

    def _read(self, track: _Track, index: int) -> Any:
        """Return the current value of a group; for the momentum, the first beta if that was set."""
        group = track.groups[index]
        betas = group.get("betas", ())[:1]
        if track.name == "momentum" and betas and betas[0] != track.written[index]:
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
        scheduled = {*self._tracks, *(["betas"] if "momentum" in self._tracks else [])}
        found = []
        for index, (base, group) in enumerate(zip(self._base, self.groups, strict=True)):
            for name, before in base.items():
                now = group.get(name)
                numbers = now if isinstance(now, tuple) else (now,)
                is_new = name not in scheduled and now != before
                if is_new and all(map(is_host_number, numbers)):
                    value = list(now) if isinstance(now, tuple) else now
                    found.append({"group": index, "name": name, "value": value})
        return found

    def load_unscheduled(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Set values as `unscheduled` returns them, unless they have a schedule by now."""
        for entry in values:
            group, name, value = (entry[key] for key in ("group", "name", "value"))
            if group < len(self.groups) and name in self.groups[group] and name not in self._tracks:
                self.groups[group][name] = tuple(value) if isinstance(value, list) else value


def _trace(track: _Track, value: np.ndarray, rows: _Rows) -> Iterator[np.ndarray]:
    """Yield the values before the rows, which are given, and after each, float64[n, G] in parts."""
    yield value[None]
    for first in range(0, len(rows.times), _CHUNK):
        _, members, a, b, c = (column[first : first + _CHUNK] for column in rows)
        weights = np.where(track.scheduled[members], a[:, None], 1.0)
        y = b[:, None] * track.targets[members]
        z = c[:, None] * track.initials[members]
        sets = a == 0.0
        y[sets] = np.maximum(y[sets] + z[sets], track.floors[members[sets]])
        z[sets] = 0.0
        values = np.empty_like(y)
        for group, now in enumerate(value.tolist()):  # Python's floats: NumPy is slow here
            terms = zip(*(each[:, group].tolist() for each in (weights, y, z)), strict=True)
            values[:, group] = [now := x * now + more + last for x, more, last in terms]
        value = values[-1]
        yield values


def _mirror(group: Group) -> None:
    """Set the first beta to the momentum."""
    if "betas" in group:
        group["betas"] = (group["momentum"], *group["betas"][1:])


def value_range(name: str) -> tuple[float, float, str]:
    """Return the least and the greatest legal value of a hyperparameter, and both in words."""
    return _RANGES.get(name, (-_MAX, _MAX, "finite"))


def chain_of(optimizer: Any) -> ScheduleChain:
    """Return the schedules of an optimizer wrapper, which are created with the first one."""
    if getattr(optimizer, "schedule_chain", None) is None:
        optimizer.schedule_chain = ScheduleChain(optimizer)
    return optimizer.schedule_chain
