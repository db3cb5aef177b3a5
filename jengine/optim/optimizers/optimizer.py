"""Optimizers before the parameters are known: group settings, and a function that builds the chain.

No chain part closes over a hyperparameter. The chain is built while tracing, from traced
hyperparameters, as in `optax.inject_hyperparams`, so that schedules change them without
recompilation.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, ParamSpec

import optax
from optax import OptState, Updates

from jengine.config.registry import OPTIM_WRAPPERS, OPTIMIZERS
from jengine.model.roles import Role
from jengine.optim.optimizers.common import Parts, chain_with_decay

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Optimizer: a chain, and parameter group settings.

    It is also a gradient transformation: `init` and `update` are those of
    `OptimWrapper(optimizer).tx`.

    >>> import jax.numpy as jnp
    >>> from jengine.optim.optimizers.sgd import SGD
    >>> optimizer, params = SGD(lr=0.5), {"w": jnp.array([2.0, 4.0])}
    >>> updates, state = optimizer.update({"w": jnp.ones(2)}, optimizer.init(params), params)
    >>> updates["w"].tolist()
    [-0.5, -0.5]

    Attributes:
      name: name in a config.
      defaults: default group settings: lr, weight_decay, momentum or betas, eps, flags.
      parts: `parts(**settings)` returns the named chain parts. It is called while tracing, with
        traced scalars for `hyperparams`, and scalar trees like the parameters for the
        `per_parameter` ones that differ.
      hyperparams: names for the traced settings: floats, and float tuples.
      per_parameter: the `hyperparams` that may differ between parameters in one chain. Groups that
        differ in other settings have separate chains.
      absent_at_zero: the `hyperparams` that are constants if they start at 0 in all groups in a
        chain, which then has no part or no state for them (weight decay, momentum).
      whole_tensor: whether an update depends on the whole tensor (norms, matrix factors), so that
        the layers of a stacked parameter cannot be in several groups.
      by_layer: whether an update depends on whole layers, so that `parts` takes `stacked`, a tree
        like the parameters with the axes along which layers are stacked.
      kinds: kinds of parameters, see `Role`, for which the defaults hold; `parts` then takes
        `roles`, a tree of `Role`s like the parameters. None: the same for all kinds.
      others: settings that differ from `defaults` for parameters of other kinds.
      groups: settings that differ from `defaults`, each with 'params'; None: one group with all
        parameters, or two with `kinds`.
    """

    name: str
    defaults: Mapping[str, Any]
    parts: Callable[..., Parts]
    hyperparams: tuple[str, ...]
    per_parameter: tuple[str, ...] = ("lr", "weight_decay")
    absent_at_zero: tuple[str, ...] = ("weight_decay",)
    whole_tensor: bool = False
    by_layer: bool = False
    kinds: tuple[str, ...] | None = None
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] | None = None

    def with_groups(self, groups: Sequence[Mapping[str, Any]]) -> "Optimizer":
        """Copy this optimizer with parameter groups.

        Args:
          groups: setting dicts with `params`: a dotted path, or a list of them; a path includes all
            parameters below it. Parameters in no group are frozen.
        """
        return dataclasses.replace(self, groups=tuple(groups))

    def settings_of(self, role: Role | None) -> dict[str, Any]:
        """Return the default settings of a parameter with this role, where they differ from
        `defaults`.
        """
        if self.kinds is None or role is None or role.kind in self.kinds:
            return {}
        return dict(self.others)

    # -------------------- use without a wrapper, as in PyTorch

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

    def init(self, params: Any) -> Any:
        """Return the initial state."""
        return self._wrapper.init(params)

    def update(
        self, grads: Updates, state: OptState, params: Any | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        """Return the updates, for `optax.apply_updates`, and the new state.

        See `OptimWrapper.update`.
        """
        return self._wrapper.update(grads, state, params, **extra)


def define_optimizer(
    *hyperparams: str,
    decay: Literal["coupled", "decoupled"] | None = None,
    check: Callable[[str, Mapping[str, Any]], None] | None = None,
    by_role: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    **flags: Any,
) -> Callable[[Callable[P, Parts]], Callable[P, Optimizer]]:
    """Turn a function from settings to chain parts into a registered optimizer with these settings.

    The function's annotations and defaults hold for the config. When a step is traced, the function
    is called as `Optimizer.parts`, with traced `hyperparams`; its arguments `roles` and
    `stacked`, if it has these, are no settings.

    Args:
      *hyperparams: see `Optimizer`.
      decay: the function returns only the parts that rescale gradients, which
        `chain_with_decay` completes by weight decay and learning rate; None if it returns all.
      check: takes name and settings, and raises ValueError for those that annotations cannot
        exclude.
      by_role: takes the settings, removes those that are no group settings, and returns the
        `Optimizer`'s `kinds` and `others`.
      **flags: further attributes of the `Optimizer`.
    """

    def define(row: Callable[P, Parts]) -> Callable[P, Optimizer]:
        signature = inspect.signature(row)
        settings = [p for p in signature.parameters.values() if p.name not in ("roles", "stacked")]
        signature = signature.replace(parameters=settings, return_annotation=Optimizer)
        name = row.__name__

        @functools.wraps(row)
        def parts(*args: P.args, **settings: P.kwargs) -> Parts:
            scale = row(*args, **settings)
            given: Mapping[str, Any] = settings
            if decay is None:
                return scale
            return chain_with_decay(
                scale,
                given["lr"],
                given["weight_decay"],
                decoupled=decay == "decoupled" or given.get("decoupled_weight_decay", False),
                maximize=given.get("maximize", False),
            )

        @functools.wraps(row)
        def build(*args: P.args, **kwargs: P.kwargs) -> Optimizer:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            settings = {key: _plain(value) for key, value in bound.arguments.items()}
            if check is not None:
                check(name, settings)
            own = {} if by_role is None else by_role(settings)
            return Optimizer(name, settings, parts, hyperparams, **flags, **own)

        parts.__qualname__ = f"{name}.parts"  # a pickle names functions by their path
        vars(build).update(parts=parts, __signature__=signature)
        return OPTIMIZERS.register_module()(build)

    return define


def _plain(value: Any) -> Any:
    """Convert a number list from a config to a float tuple."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(float(item) if isinstance(item, Real) else item for item in value)
