"""Schedule a value by a rule, including warm-ups from 0, which hide the value until they restore it."""

import math
from typing import Any

from jengine.optim.schedules.rules import Affine, Rule
from jengine.optim.schedules.scheduler import Group, ParamScheduler, default_group


class Frozen(float):
    """Represent the value 0 during a warm-up from 0, with the hidden value that the warm-up restores.

    Other schedules of the chain change the hidden value, so that the product is exact in any order.
    """

    hidden: float

    def __new__(cls, hidden: float) -> "Frozen":
        """Return a 0 that hides `hidden`."""
        value = super().__new__(cls, 0.0)
        value.hidden = hidden
        return value


class RuleScheduler(ParamScheduler):
    """Schedule a value by a `Rule`, a pure function of the step."""

    settings: Rule

    def step(self) -> None:
        """Count an iteration or epoch; from `begin` to `end`, set the next value of every scheduled group.

        Raises:
          ConfigError: a value is negative, infinite or NaN, or a momentum above 1; the group keeps the last one.
        """
        # A run calls this once per iteration and schedule, between two compiled steps: keep the common path short.
        self.global_step = now = self.global_step + 1
        if not self.begin <= now < self.end:
            return
        self.last_step = t = self.last_step + 1
        change = self._change(t)
        if change is None:
            return
        a, b, c = change
        name, special = self.param_name, t <= self._special_until
        lowest, highest = self._lowest, self._highest
        groups = self.optimizer.param_groups if self._default_group is None else self._groups()
        for index, initial, target in self._scheduled:
            group = groups[index]
            value = group[name]
            if special or type(value) is Frozen:
                self._apply_special(group, t, change, initial, target)
                continue
            value = a * value + b * target + c * initial
            if not lowest <= value <= highest:  # also NaN
                raise self._value_error(value)
            group[name] = value
        if self.verbose:
            self._log_values()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a scheduler and, during a warm-up from 0, the hidden values."""
        state = super().state_dict()
        if 0 <= self.last_step < self._frozen_steps:
            groups = self._groups()
            values = [groups[scheduled.group_index][self.param_name] for scheduled in self._scheduled]
            state["hidden"] = [v.hidden if isinstance(v, Frozen) else float(v) for v in values]
        return state

    def load_state_dict(self, state: dict[str, Any], settings: str = "checkpoint") -> None:
        """Load the state of a scheduler and the hidden values of a warm-up from 0; see `ParamScheduler`."""
        super().load_state_dict(state, settings)
        if "hidden" in state and 0 <= self.last_step < self._frozen_steps:
            groups = self._groups()
            for scheduled, hidden in zip(self._scheduled, state["hidden"], strict=True):
                self._write(groups[scheduled.group_index], Frozen(hidden))

    def _bind(self) -> None:
        num_steps = int(self.end - self.begin)
        values = [0.0 if value is None else value for value in self.base_values]
        present = [value for value in self.base_values if value is not None]
        reference = present[-1] if default_group(self.optimizer) else present[0]
        targets = self.settings.targets(values, reference)
        initial_values = self.settings.initial_values(values)
        self.base_values = [
            None if old is None else new for old, new in zip(self.base_values, initial_values, strict=True)
        ]
        super()._bind()
        self._scheduled = [scheduled._replace(target=targets[scheduled.group_index]) for scheduled in self._scheduled]
        groups = self._groups()
        for scheduled in self._scheduled:
            groups[scheduled.group_index][f"initial_{self.param_name}"] = scheduled.initial
        self._change = self.settings.bind(num_steps)
        self._frozen_steps = self.settings.frozen_steps(num_steps)
        self._min_value = self.settings.min_value()
        special = self._min_value > -math.inf or (self.mirrors_betas and any("betas" in group for group in groups))
        self._special_until = math.inf if special else self._frozen_steps or -1

    def _apply_special(self, group: Group, t: int, change: Affine, initial: float, target: float) -> None:
        """Apply the change to a value that is frozen, has a lower bound, or is mirrored in `betas`."""
        value = group[self.param_name]
        is_frozen = type(value) is Frozen
        is_restored = t == self._frozen_steps > 0
        if is_frozen:
            value = value.hidden
        elif is_restored and value == 0.0:
            value = initial  # the hidden value was lost in a checkpoint that stores plain numbers
        a, b, c = change
        value = max(a * value + b * target + c * initial, self._min_value)
        if not self._lowest <= value <= self._highest:
            raise self._value_error(value)
        self._write(group, Frozen(value) if t < self._frozen_steps or (is_frozen and not is_restored) else value)
