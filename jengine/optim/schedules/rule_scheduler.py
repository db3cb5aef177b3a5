"""The scheduler that follows a rule, and the zeros that come back."""

import math
from typing import Any

from jengine.optim.schedules.rules import Affine, Rule
from jengine.optim.schedules.scheduler import Group, ParamScheduler


class Muted(float):
    """The value 0 of a warm-up from 0, with the value that it hides and that comes back when the warm-up goes on.

    Other schedules of the chain act on the hidden value meanwhile, so that their product is exact in any order.
    """

    hidden: float

    def __new__(cls, hidden: float) -> "Muted":
        """Makes a 0 that hides `hidden`."""
        value = super().__new__(cls, 0.0)
        value.hidden = hidden
        return value


class RuleScheduler(ParamScheduler):
    """A parameter scheduler whose value follows a `Rule`, a pure function of the step."""

    settings: Rule

    def step(self) -> None:
        """Counts one iteration or epoch and, inside the window, sets the next value of every driven group."""
        # A run takes this step once an iteration for each schedule: it is written to cost below a microsecond.
        self.global_step = now = self.global_step + 1
        if not self.begin <= now < self.end:
            return
        self.last_step = t = self.last_step + 1
        change = self._change(t)
        if change is None:
            return
        of_value, of_anchor, of_base = change
        name, special = self.param_name, t <= self._special_until
        groups = self._groups() if self._shadow else self.optimizer.param_groups
        for place, base, anchor in self._driven:
            group = groups[place]
            value = group[name]
            if special or type(value) is Muted:
                self._apply_special(group, t, change, base, anchor)
            else:
                group[name] = of_value * value + of_anchor * anchor + of_base * base
        if self.verbose:
            self._log_values()

    def state_dict(self) -> dict[str, Any]:
        """As for every scheduler, and during a warm-up from 0 the values that it hides."""
        state = super().state_dict()
        if 0 <= self.last_step < self._muted_steps:
            groups = self._groups()
            values = [groups[driven.place][self.param_name] for driven in self._driven]
            state["hidden"] = [v.hidden if isinstance(v, Muted) else float(v) for v in values]
        return state

    def load_state_dict(self, state: dict[str, Any], settings: str = "checkpoint") -> None:
        """As for every scheduler; hides what the state says that a warm-up from 0 hides."""
        super().load_state_dict(state, settings)
        if "hidden" in state and 0 <= self.last_step < self._muted_steps:
            groups = self._groups()
            for driven, hidden in zip(self._driven, state["hidden"], strict=True):
                self._write(groups[driven.place], Muted(hidden))

    def _bind(self) -> None:
        span = int(self.end - self.begin)
        bases = [0.0 if base is None else base for base in self.base_values]
        present = [base for base in self.base_values if base is not None]
        reference = present[-1] if getattr(self.optimizer, "base_param_settings", None) else present[0]
        anchors = self.settings.anchors(bases, reference)
        initials = self.settings.initials(bases)
        self.base_values = [None if old is None else new for old, new in zip(self.base_values, initials, strict=True)]
        super()._bind()
        self._driven = [driven._replace(anchor=anchors[driven.place]) for driven in self._driven]
        groups = self._groups()
        for driven in self._driven:
            groups[driven.place][f"initial_{self.param_name}"] = driven.base
        self._change = self.settings.bind(span)
        self._muted_steps = self.settings.muted_steps(span)
        self._least = self.settings.least()
        special = self._least > -math.inf or (self.mirrors_betas and any("betas" in group for group in groups))
        self._special_until = math.inf if special else self._muted_steps or -1

    def _apply_special(self, group: Group, t: int, change: Affine, base: float, anchor: float) -> None:
        """What few schedules need: values that are muted, have a least value, or are a part of `betas`."""
        value = group[self.param_name]
        muted = type(value) is Muted
        returns = t == self._muted_steps > 0
        if muted:
            value = value.hidden
        elif returns and value == 0.0:
            value = base  # the hidden value was lost with a checkpoint that keeps plain numbers
        value = max(change[0] * value + change[1] * anchor + change[2] * base, self._least)
        self._write(group, Muted(value) if t < self._muted_steps or (muted and not returns) else value)
