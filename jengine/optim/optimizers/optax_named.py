"""Optax's own optimizers, by their optax names and arguments, and optax chains that the user built.

An optax factory closes over its numbers. To have them as data it is called again inside the trace, with the scalars of
a group in the place of its float arguments. Each group has a chain of its own, on its own parameters.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.optim.param_group import Layout, ParamGroup, bind
from jengine.registry import OPTIMIZERS

# left out: what needs the loss (lbfgs, momo, polyak_sgd, sophia), gradients of single examples (dpsgd) or another
# transformation (schedule_free)
_NAMES = (
    "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad", "fromage",
    "lamb", "lars", "lion", "noisy_sgd", "novograd", "optimistic_adam_v2", "optimistic_gradient_descent", "radam",
    "rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi",
)  # fmt: skip
_CONTRIB_NAMES = (
    "acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "dog", "dowg", "galore", "madgrad", "muon", "prodigy",
    "schedule_free_adamw", "schedule_free_sgd", "simplified_ademamix",
)  # fmt: skip

Factory = Callable[..., optax.GradientTransformation]


def from_optax(transformation: optax.GradientTransformation) -> Optimizer:
    """A chain that is already built, as an optimizer of one group whose lr, 1.0 at first, multiplies its updates."""
    tx = optax.with_extra_args_support(transformation)

    def update(grads: Tree, state: Any, params: Tree, hp: Numbers) -> tuple[Tree, Any]:
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(lambda lr, u: lr * u, hp["lr"], updates), state

    def plan(groups: Sequence[Mapping[str, Any]]) -> Core:
        return Core(tx.init, update, core.numbers_of("lr"))

    return Optimizer("optax", {"lr": 1.0}, plan, whole_tensor=True)


def register(factory: Factory) -> None:
    """Makes an optax factory known to configs under its own name, with its own arguments.

    Args:
      factory: a function of `learning_rate` and other settings that returns a gradient transformation.
    """
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Optimizer:
        """The optimizer of optax with these arguments, its rate as this project's groups have it."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        lr = settings.pop("learning_rate")
        if callable(lr):
            raise TypeError(
                f"{factory.__name__}: learning_rate must be a number, found a schedule; put it into param_scheduler"
            )
        if lr is not None:
            core.in_range(factory.__name__, lr=lr)
        return Optimizer(factory.__name__, {"lr": lr, **settings}, functools.partial(_plan, factory), whole_tensor=True)

    OPTIMIZERS.register_module()(build)


def _plan(factory: Factory, groups: Sequence[Mapping[str, Any]]) -> Core:
    # the floats of the first group are data in all; the rest decides which operations there are
    data = ["lr", *(k for k, v in groups[0].items() if k != "lr" and isinstance(v, float) and _takes(factory, k))]
    owned = [group if isinstance(group, ParamGroup) else ParamGroup(group) for group in groups]

    def chain(group: Mapping[str, Any], numbers: Mapping[str, Any]) -> optax.GradientTransformation:
        fixed = {k: v for k, v in group.items() if k not in data and k != "lr" and _takes(factory, k)}
        moving = {k: v for k, v in numbers.items() if k != "lr"}
        return factory(learning_rate=numbers["lr"], **fixed, **moving)

    def init(params: Tree) -> tuple[Any, ...]:
        layout = bind(params, owned)
        params = _wide(params)
        return tuple(
            chain(group, {k: group[k] for k in data}).init(_part(layout, params, i)) for i, group in enumerate(owned)
        )

    def update(grads: Tree, state: tuple[Any, ...], params: Tree, hp: Numbers) -> tuple[Tree, tuple[Any, ...]]:
        """Each group's updates by a chain of its own."""
        layout = bind(params, owned)
        params = _wide(params)
        updates: Tree = jax.tree.map(lambda p: None, params)
        states = []
        for index, group in enumerate(owned):
            first = layout.groups.index(index)
            numbers = {name: layout.flatten(hp[name])[first] for name in data}
            own, inner = chain(group, numbers).update(
                _part(layout, grads, index), state[index], _part(layout, params, index)
            )
            updates = layout.fill(own, updates)
            states.append(inner)
        return updates, tuple(states)

    return Core(init, update, core.numbers_of(*data))


def _takes(factory: Factory, name: str) -> bool:
    return name in inspect.signature(factory).parameters


def _part(layout: Layout, tree: Tree, group: int) -> Tree:
    """The leaves of one group, None elsewhere."""
    leaves = layout.flatten(tree)
    return layout.treedef.unflatten([x if g == group else None for x, g in zip(leaves, layout.groups, strict=True)])


def _wide(tree: Tree) -> Tree:
    """At least float32: optax keeps its state in the dtype of the parameters."""
    return jax.tree.map(lambda p: jnp.asarray(p, core.state_dtype(p.dtype)), tree)


for _name in _NAMES:
    register(getattr(optax, _name))
for _name in _CONTRIB_NAMES:
    register(getattr(optax.contrib, _name))
