"""Matrices in parameters by role: one for each layer, expert, fused projection and attention head.

What an optimizer of matrices does is a function of one layer; here it is applied to all, on a mesh
without gathering more than one.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as _Spec
from optax import Updates

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.extras.optimizers.trees import require_params
from jengine.model.constrain import axes_of_type, set_sharding
from jengine.model.roles import Role
from jengine.optim.optimizers.adam import scale_by_adam
from jengine.optim.optimizers.common import Parts, Scalar, is_zero
from jengine.optim.transforms.groups import (
    PerParameter,
    add_decayed_weights_by_rule,
    broadcast_to_params,
    scale_by_group_learning_rate,
)

# the kinds of `Role` whose parameters have inputs and outputs
MatrixKind: TypeAlias = Literal[
    "hidden", "convolution", "input", "head", "embedding", "router", "adapter"
]
# mesh axes that replicate the parameters: what is sharded over them has to be gathered again
_REPLICAS = ("data", "context")


def split_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the settings out that say what AdamW trains; see `define_optimizer(by_role=)`."""
    rate = settings.pop("adam_learning_rate")
    others = {
        "lr": settings["lr"] if rate is None else rate,
        "weight_decay": settings.pop("adam_weight_decay"),
        "adam": True,
    }
    return {"kinds": tuple(settings.pop("kinds")), "others": others}


def complete_chain(
    scale: Parts, lr: PerParameter, weight_decay: PerParameter, cautious: bool
) -> Parts:
    """Return `scale`, decoupled weight decay and the learning rate.

    Args:
      scale: the parts that rescale gradients.
      lr, weight_decay: as in `chain_with_decay`.
      cautious: decay only the elements that the update moves towards 0 (Chen et al.,
        arXiv:2510.12402).
    """
    add_decay = add_cautious_decay if cautious else add_decayed_weights_by_rule
    decay = [] if is_zero(weight_decay) else [("add_decayed_weights", add_decay(weight_decay))]
    return [*scale, *decay, ("scale_by_learning_rate", scale_by_group_learning_rate(lr))]


def add_cautious_decay(weight_decay: PerParameter) -> optax.GradientTransformation:
    """Add `weight_decay` times the parameters where they have the sign of the update."""

    def update(updates: Updates, params: Any | None) -> Updates:
        params = require_params("cautious weight decay", params)
        return jax.tree.map(
            lambda u, wd, p: u + wd * jnp.where(u * p >= 0, p, 0),
            updates,
            broadcast_to_params(weight_decay, params),
            params,
        )

    return optax.stateless(update)


def adam_parts(b1: Scalar, b2: Scalar, eps: float) -> Parts:
    """Return Adam, for the parameters that are no matrices."""
    return [("scale_by_adam", scale_by_adam(b1, b2, eps))]


def check_matrices(optimizer: str, roles: Any) -> None:
    """Raise ConfigError for a parameter without inputs or outputs."""
    for path, role in paths.flatten(roles).items():
        if not role.fan_in or not role.fan_out:
            raise ConfigError(
                f"{optimizer}: parameter {path!r} must have a role with `fan_in` and `fan_out`, "
                f"got {role.kind!r}; set adam=True for its group"
            )


class Matrices(NamedTuple):
    """Matrices in a parameter.

    Attributes:
      values: float[N, inputs, outputs].
      batch: the sizes whose product is N: layers, experts, fused projections, heads.
      join: puts arrays like `values` together to one like the parameter; where they have the size 1
        in place of the inputs or outputs, it has axes of the size 1.
    """

    values: jax.Array
    batch: tuple[int, ...]
    join: Callable[[jax.Array], jax.Array]


def split_matrices(x: jax.Array, role: Role, per_head: bool = False) -> Matrices:
    """Return the matrices in a parameter.

    >>> qkv = Role("hidden", fan_in=(1,), fan_out=(2,), stacked=(0,), parts=3)
    >>> split_matrices(jnp.zeros((2, 8, 24)), qkv).values.shape
    (6, 8, 8)

    Args:
      x: the parameter, or an array like it.
      role: its role; the axes that are neither in `fan_in` nor in `fan_out` number layers.
      per_head: whether each attention head has a matrix of its own.
    """
    first = role.fan_out[0]
    shape = (*x.shape[:first], role.parts, x.shape[first] // role.parts, *x.shape[first + 1 :])

    # The axis of the parts is new, so that those from it on are one further.
    def shift(axes: Sequence[int]) -> list[int]:
        return [axis + (axis >= first) for axis in axes]

    head = role.heads if per_head else None
    rows = shift([axis for axis in role.fan_in if axis != head])
    columns = shift([axis for axis in role.fan_out if axis != head])
    layers = shift(_layer_axes(x.ndim, role))
    inner = [axis for axis in range(len(shape)) if axis not in (*rows, *columns, *layers)]
    batch = [*layers, *inner]
    order = (*batch, *rows, *columns)
    sizes = [tuple(shape[axis] for axis in axes) for axes in (batch, rows, columns)]
    values = x.reshape(shape).transpose(order).reshape(*map(math.prod, sizes))

    def join(matrices: jax.Array) -> jax.Array:
        pairs = zip(sizes, matrices.shape, strict=True)
        kept = [size if math.prod(size) == n else (1,) * len(size) for size, n in pairs]
        split = matrices.reshape(*itertools.chain(*kept)).transpose(np.argsort(order))
        return split.reshape(*split.shape[:first], -1, *split.shape[first + 2 :])

    return Matrices(values, sizes[0], join)


def _layer_axes(ndim: int, role: Role) -> list[int]:
    """Return the axes along which layers are stacked."""
    return [axis for axis in range(ndim) if axis not in (*role.fan_in, *role.fan_out)]


def set_explicit(x: jax.Array, spec: _Spec) -> jax.Array:
    """Return an array with a sharding over the explicit axes of the mesh, if there are any.

    Reshapes need axes that are not sharded over these.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not axes_of_type(mesh, AxisType.Explicit):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def map_layers(
    function: Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]],
    role: Role,
    like: Sequence[jax.Array],
    others: Sequence[jax.Array] = (),
    shared: Sequence[Scalar] = (),
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Apply a function of one layer to all.

    On a mesh each device computes some of them, where the number can be divided. Otherwise one
    follows the other, each divided among the devices: see `map_matrices`.

    Args:
      function: `(role, shared, like, others)` with the role and the arrays of one layer, returns
        the new `like` and `others`.
      role: role of the parameter.
      like: the parameter, or arrays with its axes.
      others: arrays whose first axes are those of the stacked layers.
      shared: numbers for all of them, which a mapped function must not close over.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = _layer_axes(like[0].ndim, role)
    sizes = tuple(like[0].shape[axis] for axis in axes)
    front = range(len(axes))
    typed = [jax.typeof(x).sharding.spec for x in like]
    # The layers first, and nothing else changed: what is sharded stays so until there is one layer.
    layers = [jnp.moveaxis(set_explicit(x, _Spec()), axes, front) for x in like]
    layers, rest = jax.tree.map(
        lambda x: x.reshape(math.prod(sizes), *x.shape[len(axes) :]), (layers, list(others))
    )
    left = [axis for axis in range(like[0].ndim) if axis not in axes]
    fans = [tuple(map(left.index, fan)) for fan in (role.fan_in, role.fan_out)]
    heads = left.index(role.heads) if role.heads in left else None
    own = dataclasses.replace(role, fan_in=fans[0], fan_out=fans[1], stacked=(), heads=heads)
    function = functools.partial(function, own)
    new = _map_first(function, mesh, tuple(shared), layers, rest)
    new_like, new_others = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), new)
    restored = [jnp.moveaxis(x, front, axes) for x in new_like]
    pairs = zip(restored, like, typed, strict=True)
    return [
        set_explicit(x, spec) if x.shape == old.shape else x for x, old, spec in pairs
    ], new_others


def _map_first(
    function: Callable[..., Any], mesh: AbstractMesh, shared: Sequence[Scalar], *arrays: Any
) -> Any:
    """Map `function(shared, *arrays)` over the first axis."""
    usable = _usable_axes(mesh)
    if not usable:
        return jax.vmap(functools.partial(function, shared))(*arrays)
    batch = _divide(mesh, usable, jax.tree.leaves(arrays)[0].shape[0])
    if not batch:
        # Each result goes back to where its layer came from before the next one's turn: XLA would
        # rather gather the results of all.
        return jax.lax.map(
            lambda each: jax.tree.map(_shard_like, each, function(shared, *each)), arrays
        )

    def move(arrays: Any, counts: Sequence[int]) -> Any:
        # One mesh axis after the other: XLA gathers the whole for a change of several at once.
        for count in counts:
            arrays = jax.tree.map(
                lambda x, count=count: set_sharding(
                    x, mesh, _Spec(batch[:count], *[_Spec.UNCONSTRAINED] * (x.ndim - 1))
                ),
                arrays,
            )
        return arrays

    # Mapped by hand, as XLA gathers the operands of decompositions.
    mapped = jax.shard_map(
        lambda shared, arrays: jax.vmap(functools.partial(function, shared))(*arrays),
        in_specs=(_Spec(), _Spec(batch)),
        out_specs=_Spec(batch),
        axis_names=set(batch),
        check_vma=False,
    )
    counts = range(1, len(batch) + 1)
    return move(mapped(shared, move(arrays, counts)), counts[::-1])


def _shard_like(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return `new` where `old` is.

    A choice between two arrays is made where both are, and XLA does not see that it is always the
    same one.
    """
    return jnp.where(jax.lax.optimization_barrier(True), new, old)


def map_matrices(
    function: Callable[..., Any], matrices: jax.Array, *others: jax.Array, whole: bool = False
) -> Any:
    """Apply a function of one matrix to the matrices of a layer.

    On a mesh each is sharded along the longer side.

    Args:
      function: `(matrix, *others)`, returns an array or a tuple of arrays.
      matrices: float[N, inputs, outputs].
      *others: arrays with the first axis N.
      whole: whether a device needs a whole matrix, such as for a decomposition.
    """
    mesh = jax.sharding.get_abstract_mesh()  # without the axes over which layers are mapped
    usable = _usable_axes(mesh)
    if usable:
        longer = int(matrices.shape[2] >= matrices.shape[1])
        split: list[Any] = [None, None, None]
        if not whole:
            split[1 + longer] = _divide(mesh, usable, matrices.shape[1 + longer]) or None
        matrices = set_sharding(matrices, mesh, _Spec(*split))
        others = tuple(set_sharding(x, mesh, _Spec()) for x in others)
    return jax.vmap(function)(matrices, *others)


def _usable_axes(mesh: AbstractMesh) -> list[str]:
    """Return the mesh axes that shard parameters."""
    usable = axes_of_type(mesh, AxisType.Auto) - set(_REPLICAS)
    return [name for name in mesh.axis_names if name in usable and mesh.shape[name] > 1]


def _divide(mesh: AbstractMesh, names: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the mesh axes over which `count` things can be divided evenly."""
    chosen = []
    for name in names:
        if count % mesh.shape[name] == 0:
            chosen.append(name)
            count //= mesh.shape[name]
    return tuple(chosen)
