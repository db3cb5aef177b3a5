"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.config.annotations import Count, Decay, NonNegative
from jengine.extras.optimizers import matrices, trees
from jengine.extras.optimizers.matrices import MatrixKind
from jengine.model.roles import Role
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
        settings = SoapSettings(
            *betas, decay, eps, precondition_frequency, max_precondition_size, per_head
        )
        scale = [("scale_by_soap", scale_by_soap(settings, roles))]
    return matrices.complete_chain(scale, lr, weight_decay, cautious)


class SoapSettings(NamedTuple):
    """Settings of `scale_by_soap`, see `SOAP`."""

    b1: Scalar
    b2: Scalar
    shampoo_beta: Scalar
    eps: float
    frequency: int
    max_size: int
    per_head: bool


class Side(NamedTuple):
    """Shampoo's preconditioner for the inputs or the outputs; empty, of size 0, without one."""

    gram: Updates  # average of G @ G.T, [..., inputs, inputs], or of G.T @ G, for each matrix
    basis: Updates  # its eigenvectors, of the same shape


class SoapState(NamedTuple):
    """SOAP's state."""

    count: jax.Array  # type: ignore[assignment]  # int32[], calls done; the first is no update
    mu: Updates  # average gradients, like the parameters
    nu: Updates  # average squares in the eigenbasis, like the parameters
    inputs: Side
    outputs: Side


def scale_by_soap(settings: SoapSettings, roles: Updates) -> optax.GradientTransformation:
    """Rescale gradients by Adam in the eigenbasis of Shampoo's preconditioner.

    `roles` is a tree of `Role`s like the parameters.
    """

    def init(params: Any) -> SoapState:
        matrices.check_matrices("SOAP", roles)

        def gram(side: int, role: Role, p: jax.Array) -> jax.Array:
            split = matrices.split_matrices(p, role, settings.per_head)
            size = split.values.shape[side]
            size = size if size <= settings.max_size else 0
            return jnp.zeros((*split.batch, size, size), common.state_dtype(p.dtype))

        sides = [
            Side(*[jax.tree.map(functools.partial(gram, side), roles, params) for _ in range(2)])
            for side in (1, 2)
        ]
        moments = [common.zeros_like(params) for _ in range(2)]
        return SoapState(common.zero_count(), *moments, *sides)

    def update(
        grads: Updates, state: SoapState, params: Any | None = None
    ) -> tuple[Updates, SoapState]:
        def leaf(role: Role, *arrays: jax.Array) -> tuple[jax.Array, ...]:
            *values, in_gram, in_basis, out_gram, out_basis = arrays
            split = [matrices.split_matrices(x, role, settings.per_head) for x in values]
            sides = [in_gram, in_basis, out_gram, out_basis]
            flat = [x.reshape(split[0].values.shape[0], *x.shape[-2:]) for x in sides]
            parts = (part.values for part in split)
            numbers = (state.count, settings.b1, settings.b2, settings.shampoo_beta)
            step = functools.partial(_update_matrix, settings)
            new = matrices.map_matrices(step, *parts, *flat, shared=numbers, whole=True)
            joined = [split[0].join(x) for x in new[:3]]
            return *joined, *(x.reshape(old.shape) for x, old in zip(new[3:], sides, strict=True))

        updates, mu, nu, *sides = trees.map_unzipped(
            leaf, roles, grads, state.mu, state.nu, *state.inputs, *state.outputs
        )
        new_state = SoapState(state.count + 1, mu, nu, Side(*sides[:2]), Side(*sides[2:]))
        return updates, new_state

    return optax.GradientTransformation(init, update)


def _update_matrix(
    settings: SoapSettings,
    count: jax.Array,
    b1: Scalar,
    b2: Scalar,
    shampoo_beta: Scalar,
    grad: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    *sides: Any,
) -> tuple[jax.Array, ...]:
    """Return the update for a matrix, the moments, and gram matrix and basis of both sides."""
    in_gram, in_basis, out_gram, out_basis = sides
    # A rotation in bfloat16, the default of some devices, would not be one.
    with jax.default_matmul_precision("highest"):
        is_update = (count > 0).astype(grad.dtype)
        new_mu = mu + (1 - b1) * is_update * (grad - mu)
        rotated = _rotate(grad, in_basis, out_basis)
        new_nu = nu + (1 - b2) * is_update * (rotated * rotated - nu)
        # Adam as the authors write it, with eps before the bias correction
        t = jnp.maximum(count, 1)
        rate = jnp.sqrt(common.bias_correction(b2, t))
        rate /= common.bias_correction(b1, t)
        scaled = _rotate(new_mu, in_basis, out_basis) / (jnp.sqrt(new_nu) + settings.eps)
        update = is_update * rate * _rotate(scaled, in_basis.T, out_basis.T)
        # after the update, which must not see its own gradient in the basis
        in_gram = _average(in_gram, shampoo_beta, grad)
        out_gram = _average(out_gram, shampoo_beta, grad.T)
        is_new_basis = (count % settings.frequency == 0) & (count > 0)
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


def _rotate(x: jax.Array, in_basis: jax.Array, out_basis: jax.Array) -> jax.Array:
    """Return a matrix in the bases of both sides."""
    x = in_basis.T @ x if in_basis.size else x
    return x @ out_basis if out_basis.size else x


def _average(gram: jax.Array, beta: Scalar, grad: jax.Array) -> jax.Array:
    """Return the new average of `grad @ grad.T`."""
    return common.moving_average(gram, beta, grad @ grad.T) if gram.size else gram


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
