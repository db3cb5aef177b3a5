"""Describe an optimizer before it knows any parameters: the settings of its groups, and the parts of its chain.

The parts never close over a number that may change during training. They are built inside the trace from numbers that
are data, as in `optax.inject_hyperparams`, so that schedules move them and nothing is compiled again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import optax

from jengine.errors import ConfigError
from jengine.optim.optimizers.common import Parts, Tree
from jengine.registry import OPTIM_WRAPPERS


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Describe an optimizer by its chain and the settings of its parameter groups.

    By itself it is a gradient transformation: `init` and `update` are those of `OptimWrapper(optimizer).tx`.

    Attributes:
      name: its name in a config.
      defaults: the settings that a parameter group starts from: lr, weight_decay, momentum or betas, eps, flags.
      parts: `parts(**settings)` returns the named parts of the chain; it is called in the trace, with traced scalars
        for `numbers`, and trees of scalars like the parameters for those `by_leaf` that differ.
      numbers: the settings that are data: floats, and tuples of floats.
      by_leaf: those of `numbers` that may differ from parameter to parameter in one chain. Groups that differ in other
        settings have chains of their own.
      absent_at_zero: those of `numbers` that are constant if they are 0 at first in all groups of a chain, which then
        has no part or no state for them (weight decay, momentum).
      whole_tensor: an update depends on the whole tensor (norms, matrix factors), so that the layers of a stacked
        parameter cannot be in several groups.
      groups: settings that differ from `defaults`, each with its 'params'; None: one group of all parameters.
    """

    name: str
    defaults: Mapping[str, Any]
    parts: Callable[..., Parts]
    numbers: tuple[str, ...]
    by_leaf: tuple[str, ...] = ("lr", "weight_decay")
    absent_at_zero: tuple[str, ...] = ("weight_decay",)
    whole_tensor: bool = False
    groups: tuple[Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        for name in self.numbers:
            values = self.defaults[name]
            for value in values if isinstance(values, Sequence) else (values,):
                if isinstance(value, Real) and not math.isfinite(value):
                    raise ConfigError(f"`{self.name}.{name}` must be finite, got {value}")

    def with_groups(self, groups: Sequence[Mapping[str, Any]]) -> "Optimizer":
        """Return the same optimizer on parameter groups.

        Args:
          groups: each a dict of settings with `params`: a dotted path, or a list of them; a path stands for all the
            parameters below it. Parameters that no group names are frozen.

        Raises:
          ValueError: a group without 'params'.
        """
        for index, group in enumerate(groups):
            if "params" not in group:
                raise ValueError(f"parameter group {index} of {self.name} must have 'params', got {sorted(group)}")
        return dataclasses.replace(self, groups=tuple(dict(g) for g in groups))

    # ------------------------------------------------------------------ usable by itself, as in PyTorch

    @functools.cached_property
    def _wrapper(self) -> Any:
        return OPTIM_WRAPPERS.get("OptimWrapper")(self)

    @property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer as an optax transformation."""
        return self._wrapper.tx

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        return self._wrapper.param_groups

    def init(self, params: Tree) -> Any:
        """Return the state before the first update."""
        return self._wrapper.init(params)

    def update(self, grads: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """Return the updates, to be added by `optax.apply_updates`, and the new state; see `OptimWrapper.update`."""
        return self._wrapper.update(grads, state, params, **extra)
