"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from optax import Updates

from jengine.config.annotations import Count, Decay, NonNegative
from jengine.extras.optimizers import kronecker, matrices
from jengine.extras.optimizers.matrices import MatrixKind
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer

# parts of the largest eigenvalue: what is added to all, and what is none
_DAMPING = 1e-4
_ROUNDING = 1e-5


@define_optimizer("lr", "weight_decay", "betas", by_role=matrices.split_settings)
def SOAP(
    lr: NonNegative = 3e-3,
    weight_decay: NonNegative = 0.01,
    betas: tuple[Decay, Decay] = (0.95, 0.95),
    shampoo_beta: Decay | None = None,
    eps: NonNegative = 1e-8,
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
    """Build SOAP for the hidden matrices, and AdamW for the other parameters (Vyas et al.,
    arXiv:2409.11321).

    The matrices are those of `Muon`. As in the authors' code the first update of a matrix is zero:
    its gradient only initializes the basis.

    Args:
      lr: learning rate.
      weight_decay: decoupled weight decay.
      betas: decay rates of Adam's moments, also for the other parameters.
      shampoo_beta: decay rate of the preconditioner; None for the second of `betas`.
      eps: added to Adam's denominator.
      precondition_frequency: updates from one basis to the next, each by a QR decomposition.
      max_precondition_size: matrices with more inputs (or outputs) have no basis on this side.
      per_head, cautious, kinds, adam, adam_learning_rate, adam_weight_decay: see `Muon`.
    """
    if adam:
        scale = matrices.adam_parts(*betas, eps)
    else:
        decay = betas[1] if shampoo_beta is None else shampoo_beta
        step = functools.partial(_update_matrix, eps, precondition_frequency)
        tx = kronecker.scale_by_kronecker(
            "SOAP", step, (*betas, decay), max_precondition_size, per_head, roles
        )
        scale = [("scale_by_soap", tx)]
    return matrices.complete_chain(scale, lr, weight_decay, cautious)


def _update_matrix(
    eps: float,
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
    """Return the update for a matrix, the moments, and Gram matrix and basis of both sides."""
    in_gram, in_basis, out_gram, out_basis = sides
    # A rotation in bfloat16, the default of some devices, would not be one.
    with jax.default_matmul_precision("highest"):
        is_update = (count > 0).astype(grad.dtype)
        new_mu = mu + (1 - b1) * is_update * (grad - mu)
        rotated = kronecker.multiply_sides(grad, in_basis, out_basis)
        new_nu = nu + (1 - b2) * is_update * (rotated * rotated - nu)
        # Adam as the authors write it, with eps before the bias correction
        t = jnp.maximum(count, 1)
        rate = jnp.sqrt(common.bias_correction(b2, t))
        rate /= common.bias_correction(b1, t)
        scaled = kronecker.multiply_sides(new_mu, in_basis, out_basis) / (jnp.sqrt(new_nu) + eps)
        update = is_update * rate * kronecker.multiply_sides(scaled, in_basis.T, out_basis.T)
        # after the update, which must not see its own gradient in the basis
        in_gram = kronecker.average_gram(in_gram, shampoo_beta, grad)
        out_gram = kronecker.average_gram(out_gram, shampoo_beta, grad.T)
        is_new_basis = (count % frequency == 0) & (count > 0)
        change = jnp.where(count == 0, 2, is_new_basis.astype(jnp.int32))
        in_basis, in_order = _change_basis(change, in_gram, in_basis, grad.shape[0])
        out_basis, out_order = _change_basis(change, out_gram, out_basis, grad.shape[1])
        return (
            update,
            new_mu,
            new_nu[in_order][:, out_order],
            in_gram,
            in_basis,
            out_gram,
            out_basis,
        )


def _change_basis(
    change: jax.Array, gram: jax.Array, basis: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the basis and the order of the old basis vectors in it.

    `change` is 0 for the same basis, 1 for one step of the power iteration, 2 for the eigenvectors.
    """
    same = jnp.arange(size)
    if not basis.size:
        return basis, same

    def iterate() -> tuple[jax.Array, jax.Array]:
        product = gram @ basis
        values = jnp.sum(basis * product, axis=0)
        # By falling eigenvalues: QR keeps the directions of the first columns best.
        order = jnp.argsort(-values)
        # With a damping, as elsewhere in Shampoo: where the product is rounding, the old direction
        # stays.
        damped = product + _DAMPING * jnp.max(values) * basis
        return jnp.linalg.qr(damped[:, order])[0], order

    def decompose() -> tuple[jax.Array, jax.Array]:
        values, vectors = jnp.linalg.eigh(gram)
        is_null = values <= _ROUNDING * values[-1]
        # Rounding would choose a basis of the null space. Project fixed vectors instead, so that
        # equal gradients always train alike.
        null = vectors * is_null
        fixed = jax.random.normal(jax.random.key(0), gram.shape, gram.dtype)
        columns = jnp.where(is_null, null @ (null.T @ fixed), vectors)
        return jnp.linalg.qr(columns[:, ::-1])[0], same

    return jax.lax.switch(change, [lambda: (basis, same), iterate, decompose])
