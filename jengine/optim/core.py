"""What an optimizer is here: a pure core over the whole parameter tree, and the settings of its parameter groups.

A core never holds a number that may change during training. Learning rates, decays, momenta reach `update` as data:
for each of them one pytree with the structure of the parameters, whose leaves are the scalars of the leaf's group
(leaves of one group hold the very same scalar). So schedulers move them and nothing is compiled again.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

Tree: TypeAlias = Any  # a pytree of arrays with the structure of the parameters
Numbers: TypeAlias = Mapping[str, Tree]  # hyperparameter -> pytree of its scalars, float32[]


class Core(NamedTuple):
    """The pure part of an optimizer."""

    init: Callable[[Tree], Any]  # params -> state
    update: Callable[[Tree, Any, Tree, Numbers], tuple[Tree, Any]]  # grads, state, params, numbers -> updates, state
    numbers: Callable[[Mapping[str, Any]], dict[str, float]]  # the settings of a group -> what `update` is given


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer by name, before it knows any parameters.

    Attributes:
      name: what it is called in a config.
      defaults: the settings that a parameter group starts from: lr, weight_decay, momentum or betas, eps, flags.
      plan: makes the core that serves the given groups; it reads their flags, never their numbers.
      whole_tensor: the update of one element depends on its whole tensor (norms, matrix factors), so that a tensor
        cannot be divided among groups.
      param_groups: settings that differ from `defaults`, each with its 'params'; None: one group for everything.
    """

    name: str
    defaults: Mapping[str, Any]
    plan: Callable[[Sequence[Mapping[str, Any]]], Core]
    whole_tensor: bool = False
    param_groups: tuple[Mapping[str, Any], ...] | None = None

    def with_groups(self, groups: Sequence[Mapping[str, Any]]) -> "Optimizer":
        """The same optimizer on parameter groups.

        Args:
          groups: each a dict of settings with `params`: a dotted path, or a list of them; a path stands for all the
            parameters below it. Parameters that no group names are frozen.

        Raises:
          ValueError: a group without 'params'.
        """
        for index, group in enumerate(groups):
            if "params" not in group:
                raise ValueError(f"parameter group {index} of {self.name} has no 'params'; found {sorted(group)}")
        return dataclasses.replace(self, param_groups=tuple(dict(g) for g in groups))


def numbers_of(*names: str) -> Callable[[Mapping[str, Any]], dict[str, float]]:
    """The usual `Core.numbers`: the settings called `names`; of a tuple each element, `etas_0`, `etas_1`.

    Betas travel as their complements, `beta1_complement`, `beta2_complement`: a float32 beta of 0.999 is off by 6e-8,
    and so is `1 - beta`, which is a thousand times smaller.
    """

    def numbers(group: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of a group as the step takes them: tuples one by one, betas as what is missing to 1."""
        out: dict[str, float] = {}
        for name in names:
            value = group[name]
            if type(value) is float:  # as a rule; this runs once an iteration
                out[name] = value
            elif name == "betas":
                out.update({f"beta{i}_complement": 1.0 - b for i, b in enumerate(value, start=1)})
            elif isinstance(value, tuple | list):
                out.update({f"{name}_{i}": float(item) for i, item in enumerate(value)})
            else:
                out[name] = float(value)
        return out

    return numbers


def numbers_without_momentum(optimizer: str, *names: str) -> Callable[[Mapping[str, Any]], dict[str, float]]:
    """`numbers_of` for an optimizer that keeps no momentum because no group had any when it was built.

    The function raises ValueError when momentum is set later.
    """
    numbers = numbers_of(*names)

    def checked(group: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of a group whose momentum has stayed 0."""
        if group["momentum"]:
            raise ValueError(
                f"{optimizer} was built with momentum 0 and keeps none, so it cannot be moved to {group['momentum']}; "
                "start from a momentum above 0"
            )
        return numbers(group)

    return checked


def shared_flag(optimizer: str, groups: Sequence[Mapping[str, Any]], name: str) -> Any:
    """The value of a flag that all groups must share, for it decides which operations the step has.

    Raises:
      ValueError: groups disagree.
    """
    values = {group[name] for group in groups}
    if len(values) != 1:
        found = ", ".join(sorted(map(repr, values)))
        raise ValueError(f"{optimizer}: {name!r} must be the same in all parameter groups, found {found}")
    return values.pop()


def in_range(optimizer: str, low: float = 0.0, below: float | None = None, **values: float) -> None:
    """Holds settings against their legal range.

    Raises:
      ValueError: one is under `low`, or not under `below`. TypeError: one is no number.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{optimizer}: {name} must be a number, found {type(value).__name__}: {value!r}")
        if not low <= value or (below is not None and not value < below):
            legal = f"at least {low:g}" if below is None else f"in [{low:g}, {below:g})"
            raise ValueError(f"{optimizer}: {name} must be {legal}, found {value!r}")


def betas_in_range(optimizer: str, betas: Sequence[float], length: int = 2) -> tuple[float, ...]:
    """`betas` as a tuple of floats.

    Raises:
      ValueError: a wrong number of them, or one outside [0, 1).
    """
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != length:
        raise ValueError(f"{optimizer}: betas must be {length} numbers, found {betas!r}")
    in_range(optimizer, below=1.0, **{f"betas[{i}]": beta for i, beta in enumerate(betas)})
    return tuple(float(beta) for beta in betas)


def state_dtype(dtype: Any) -> Any:
    """The dtype of state that belongs to a parameter: float32, or the parameter's own if that is wider."""
    return jnp.promote_types(jnp.float32, dtype)


def zeros_like(tree: Tree) -> Tree:
    """Zeros for the state of an optimizer: shapes of `tree`, at least float32."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, state_dtype(x.dtype)), tree)


def step_zero() -> jax.Array:
    """The count of updates before the first, int32[]."""
    return jnp.zeros((), jnp.int32)


def per_group(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """`jax.tree.map` over trees of group scalars that calls `fn` once for each group, not once for each leaf."""
    seen: dict[tuple[int, ...], Any] = {}

    def once(*scalars: Any) -> Any:
        key = tuple(id(scalar) for scalar in scalars)
        if key not in seen:
            seen[key] = fn(*scalars)
        return seen[key]

    return jax.tree.map(once, *trees)


def bias_correction(complement: Tree, count: jax.Array) -> Tree:
    """`1 - beta**count` for each group, accurate in float32 where the plain formula loses five digits.

    Args:
      complement: tree of `1 - beta`, float32[].
      count: the number of this update, from 1, int32[].
    """
    return per_group(lambda c: -jnp.expm1(count.astype(c.dtype) * jnp.log1p(-c)), complement)


def mean(previous: Tree, complement: Tree, new: Tree) -> Tree:
    """The exponential mean `beta * previous + (1 - beta) * new`, given `1 - beta`."""
    return jax.tree.map(lambda m, c, x: m + c * (x - m), previous, complement, new)


def mean_of_squares(previous: Tree, complement: Tree, new: Tree) -> Tree:
    """The exponential mean of the squares of `new`, given `1 - beta`."""
    return jax.tree.map(lambda v, c, x: (1 - c) * v + c * x * x, previous, complement, new)


def unzip(tree: Tree, like: Tree, count: int) -> tuple[Tree, ...]:
    """A tree of tuples, made by a map over `like`, as a tuple of trees."""
    treedef: Any = jax.tree.structure(like)
    rows = treedef.flatten_up_to(tree)
    return tuple(treedef.unflatten([row[i] for row in rows]) for i in range(count))


def add_decay(grads: Tree, params: Tree, weight_decay: Tree) -> Tree:
    """Coupled (L2) weight decay: `grads + weight_decay * params`."""
    return jax.tree.map(lambda g, p, wd: g + wd * p, grads, params, weight_decay)


def add_decoupled_decay(updates: Tree, params: Tree, hp: Numbers) -> Tree:
    """Decoupled weight decay: `updates - lr * weight_decay * params`."""
    rate = per_group(jnp.multiply, hp["lr"], hp["weight_decay"])
    return jax.tree.map(lambda u, k, p: u - k * p, updates, rate, params)


def momentum_intake(steps: jax.Array, hp: Numbers) -> Tree:
    """The share of a gradient that enters the momentum of SGD, for each group.

    All of it in the first step, and in a group without momentum, which follows its gradient; else `1 - dampening`.

    Args:
      steps: updates done before, int32[].
      hp: numbers with `momentum` and `dampening`.
    """
    return per_group(
        lambda m, d: jnp.where((steps == 0) | (m == 0), jnp.ones_like(d), 1 - d), hp["momentum"], hp["dampening"]
    )


def norm(x: jax.Array) -> jax.Array:
    """The 2-norm of all elements, at least float32."""
    x = x.astype(state_dtype(x.dtype))
    return jnp.sqrt(jnp.sum(x * x))


def negate(tree: Tree) -> Tree:
    """Every leaf negated: what `maximize=True` does to gradients."""
    return jax.tree.map(jnp.negative, tree)
