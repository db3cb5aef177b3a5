"""Shampoo: gradients multiplied by inverse roots of their Gram matrices."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from optax import Updates

from jengine.config.annotations import Count, Decay, NonNegative
from jengine.extras.optimizers import kronecker, matrices, trees
from jengine.extras.optimizers.matrices import MatrixKind
from jengine.optim.optimizers import adam as adam_module
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer


@define_optimizer("lr", "weight_decay", "betas", by_role=matrices.split_settings)
def Shampoo(
    lr: NonNegative = 3e-3,
    weight_decay: NonNegative = 0.01,
    betas: tuple[Decay, Decay] = (0.9, 0.99),
    shampoo_beta: Decay | None = None,
    eps: NonNegative = 1e-8,
    matrix_eps: NonNegative = 1e-5,
    precondition_frequency: Count = 10,
    max_precondition_size: Count = 10000,
    per_head: bool = False,
    cautious: bool = False,
    kinds: Sequence[MatrixKind] = ("hidden", "convolution"),
    adam: bool = False,
    adam_learning_rate: NonNegative | None = None,
    adam_weight_decay: NonNegative = 0.01,
    *,
    roles: Updates,
) -> Parts:
    """Build Shampoo for the hidden matrices, and AdamW for the other parameters (Gupta et al.,
    arXiv:1802.09568).

    The matrices are those of `Muon`. As in later practice (Anil et al., arXiv:2002.09018; Shi et
    al., arXiv:2309.06497) Gram matrices are moving averages, inverse roots stay for several
    updates, the momentum is preconditioned, and an update has the norm that Adam's has. Until the
    first roots it is Adam's.

    Args:
      lr: learning rate.
      weight_decay: decoupled weight decay.
      betas: decay rates of Adam's moments, also for the other parameters.
      shampoo_beta: decay rate of the Gram matrices; None for the second of `betas`.
      eps: added to Adam's denominator.
      matrix_eps: smaller eigenvalues of a Gram matrix, as a part of the largest, are raised to
        this.
      precondition_frequency: updates from one pair of inverse roots to the next, each by an
        eigendecomposition.
      max_precondition_size: matrices with more inputs (or outputs) have no Gram matrix on this
        side, and the root of the other one is the square root.
      per_head, cautious, kinds, adam, adam_learning_rate, adam_weight_decay: see `Muon`.
    """
    if adam:
        scale = matrices.adam_parts(*betas, eps)
    else:
        decay = betas[1] if shampoo_beta is None else shampoo_beta
        step = functools.partial(_update_matrix, eps, matrix_eps, precondition_frequency)
        tx = kronecker.scale_by_kronecker(
            "Shampoo", step, (*betas, decay), max_precondition_size, per_head, roles
        )
        scale = [("scale_by_shampoo", tx)]
    return matrices.complete_chain(scale, lr, weight_decay, cautious)


def _update_matrix(
    eps: float,
    matrix_eps: float,
    frequency: int,
    count: jax.Array,
    b1: Scalar,
    b2: Scalar,
    shampoo_beta: Scalar,
    grad: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    *sides: Any,
) -> tuple[jax.Array, ...]:
    """Return the update for a matrix, the moments, and Gram matrix and root of both sides."""
    in_gram, in_root, out_gram, out_root = sides
    count = count + 1
    mu = common.moving_average(mu, b1, grad)
    nu = common.moving_average_of_squares(nu, b2, grad)
    update = adam_module.divide_corrected(b1, b2, eps, count, mu, nu)
    # In bfloat16, the default of some devices, a Gram matrix would have negative eigenvalues.
    with jax.default_matmul_precision("highest"):
        in_gram = kronecker.average_gram(in_gram, shampoo_beta, grad)
        out_gram = kronecker.average_gram(out_gram, shampoo_beta, grad.T)
        exponent = -0.5 / max(1, (in_gram.size > 0) + (out_gram.size > 0))
        invert = functools.partial(_invert, exponent, matrix_eps, count % frequency == 0)
        in_root = invert(in_gram, in_root)
        out_root = invert(out_gram, out_root)
        if in_gram.size or out_gram.size:
            direction = kronecker.multiply_sides(mu, in_root, out_root)
            size = trees.norm(direction)
            grafted = direction * (trees.norm(update) / jnp.where(size == 0, 1, size))
            update = jnp.where(count < frequency, update, grafted)
    return update, mu, nu, in_gram, in_root, out_gram, out_root


def _invert(
    exponent: float, matrix_eps: float, is_due: jax.Array, gram: jax.Array, root: jax.Array
) -> jax.Array:
    """Return the negative power of a Gram matrix, or the `root` so far."""
    if not gram.size:
        return root

    def decompose() -> jax.Array:
        values, vectors = jnp.linalg.eigh(gram)
        # The maximum, where the papers have a sum: in a null space, whose eigenvalues are rounding,
        # all are equal, so that equal gradients always train alike.
        least = jnp.maximum(matrix_eps * values[-1], jnp.finfo(gram.dtype).tiny)
        return (vectors * jnp.maximum(values, least) ** exponent) @ vectors.T

    return jax.lax.cond(is_due, decompose, lambda: root)
