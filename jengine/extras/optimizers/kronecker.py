"""What Shampoo and SOAP share: a Gram matrix for the inputs and one for the outputs of a matrix.

Their Kronecker product stands for the preconditioner of all elements.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.extras.optimizers import matrices, trees
from jengine.model.roles import Role
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Scalar


class Side(NamedTuple):
    """The inputs or the outputs of matrices; of size 0 for a side without a preconditioner."""

    gram: Updates  # average of G @ G.T, [..., inputs, inputs], or of G.T @ G, for each matrix
    factor: Updates  # what multiplies matrices on this side, of the same shape


class KroneckerState(NamedTuple):
    """State of `scale_by_kronecker`."""

    count: jax.Array  # type: ignore[assignment]  # int32[], calls done
    mu: Updates  # average gradients, like the parameters
    nu: Updates  # average squares, like the parameters
    inputs: Side
    outputs: Side


def scale_by_kronecker(
    optimizer: str,
    update_matrix: Callable[..., tuple[jax.Array, ...]],
    shared: Sequence[Scalar],
    max_size: int,
    per_head: bool,
    roles: Updates,
) -> optax.GradientTransformation:
    """Rescale the gradient of each matrix by moments and Gram matrices.

    Args:
      optimizer: name in errors.
      update_matrix: `(count, *shared, grad, mu, nu, in_gram, in_factor, out_gram, out_factor)`,
        returns the update and the new values of `mu` and those behind it. All start at 0.
      shared: hyperparameters.
      max_size: largest side with a Gram matrix.
      per_head: whether each attention head is a matrix of its own.
      roles: tree of `Role`s like the parameters.
    """

    def init(params: Any) -> KroneckerState:
        matrices.check_matrices(optimizer, roles)

        def gram(side: int, role: Role, p: jax.Array) -> jax.Array:
            split = matrices.split_matrices(p, role, per_head)
            size = split.values.shape[side]
            size = size if size <= max_size else 0
            return jnp.zeros((*split.batch, size, size), common.state_dtype(p.dtype))

        sides = [
            Side(*[jax.tree.map(functools.partial(gram, side), roles, params) for _ in range(2)])
            for side in (1, 2)
        ]
        moments = [common.zeros_like(params) for _ in range(2)]
        return KroneckerState(common.zero_count(), *moments, *sides)

    def update(
        grads: Updates, state: KroneckerState, params: Any | None = None
    ) -> tuple[Updates, KroneckerState]:
        def layer(
            role: Role, numbers: Sequence[Any], moments: Any, sides: Any
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            split = [matrices.split_matrices(x, role, per_head) for x in moments]
            parts = [part.values for part in split]
            flat = [x.reshape(parts[0].shape[0], *x.shape[-2:]) for x in sides]
            step = functools.partial(update_matrix, *numbers)
            # whole, for the decompositions
            new = matrices.map_matrices(step, *parts, *flat, whole=True)
            kept = [x.reshape(old.shape) for x, old in zip(new[3:], sides, strict=True)]
            return [split[0].join(x) for x in new[:3]], kept

        def leaf(role: Role, *arrays: jax.Array) -> tuple[jax.Array, ...]:
            numbers = (state.count, *shared)
            moments, sides = matrices.map_layers(layer, role, arrays[:3], arrays[3:], numbers)
            return *moments, *sides

        updates, mu, nu, *sides = trees.map_unzipped(
            leaf, roles, grads, state.mu, state.nu, *state.inputs, *state.outputs
        )
        new_state = KroneckerState(state.count + 1, mu, nu, Side(*sides[:2]), Side(*sides[2:]))
        return updates, new_state

    return optax.GradientTransformation(init, update)


def average_gram(gram: jax.Array, beta: Scalar, grad: jax.Array) -> jax.Array:
    """Return the new average of `grad @ grad.T`, if there is one."""
    return common.moving_average(gram, beta, grad @ grad.T) if gram.size else gram


def multiply_sides(x: jax.Array, in_factor: jax.Array, out_factor: jax.Array) -> jax.Array:
    """Return `in_factor.T @ x @ out_factor`, without the factor that a side does not have."""
    x = in_factor.T @ x if in_factor.size else x
    return x @ out_factor if out_factor.size else x
