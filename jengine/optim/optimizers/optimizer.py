"""Describe an optimizer independently of the parameters: the settings of its groups, and the parts of its chain.

The parts never close over a hyperparameter that may change during training. They are built while tracing, from traced
hyperparameters, as in `optax.inject_hyperparams`, so schedules change them without recompilation.
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

    It is also a gradient transformation: `init` and `update` are those of `OptimWrapper(optimizer).tx`.

    Attributes:
      name: its name in a config.
      defaults: the default settings of a parameter group: lr, weight_decay, momentum or betas, eps, flags.
      parts: `parts(**settings)` returns the named parts of the chain; it is called while tracing, with traced scalars
        for `hyperparams`, and trees of scalars like the parameters for the `per_parameter` ones that differ.
      hyperparams: names of the settings that are traced: floats, and tuples of floats.
      per_parameter: those of `hyperparams` that may differ between parameters in one chain. Groups that differ in
        other settings have separate chains.
      absent_at_zero: those of `hyperparams` that are constants if their initial value is 0 in all groups of a chain,
        which then has no part or no state for them (weight decay, momentum).
      whole_tensor: whether an update depends on the whole tensor (norms, matrix factors), so that the layers of a
        stacked parameter cannot be in several groups.
      groups: settings that differ from `defaults`, each with its 'params'; None: one group of all parameters.
    """

    name: str
    defaults: Mapping[str, Any]
    parts: Callable[..., Parts]
    hyperparams: tuple[str, ...]
    per_parameter: tuple[str, ...] = ("lr", "weight_decay")
    absent_at_zero: tuple[str, ...] = ("weight_decay",)
    whole_tensor: bool = False
    groups: tuple[Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        for name in self.hyperparams:
            values = self.defaults[name]
            for value in values if isinstance(values, Sequence) else (values,):
                if isinstance(value, Real) and not math.isfinite(value):
                    raise ConfigError(f"`{self.name}.{name}` must be finite, got {value}")

    def with_groups(self, groups: Sequence[Mapping[str, Any]]) -> "Optimizer":
        """Return a copy of this optimizer with parameter groups.

        Args:
          groups: each a dict of settings with `params`: a dotted path, or a list of them; a path includes all
            parameters below it. Parameters in no group are frozen.

        Raises:
          ValueError: a group without 'params'.
        """
        for index, group in enumerate(groups):
            if "params" not in group:
                raise ValueError(f"parameter group {index} of {self.name} must have 'params', got {sorted(group)}")
        return dataclasses.replace(self, groups=tuple(dict(g) for g in groups))

    # ------------------------------------------------------------------ use without a wrapper, as in PyTorch

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
        """Return the initial state."""
        return self._wrapper.init(params)

    def update(self, grads: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """Return the updates, for `optax.apply_updates`, and the new state; see `OptimWrapper.update`."""
        return self._wrapper.update(grads, state, params, **extra)
