"""Muon with the formulas of torch.optim.Muon, and Lion: optimizers that replace the momentum by
a normalized one.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Params, Updates

from jengine.config import paths
from jengine.config.annotations import Decay, Finite, Fraction, NonNegative, Range
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer


@define_optimizer("lr", "weight_decay", "momentum", decay="decoupled", whole_tensor=True)
def TorchMuon(
    lr: NonNegative = 1e-3,
    weight_decay: NonNegative = 0.1,
    momentum: Fraction = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[Finite, Finite, Finite] = (3.4445, -4.775, 2.0315),
    eps: NonNegative = 1e-7,
    ns_steps: Annotated[int, Range(ge=1, lt=100)] = 5,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
) -> Parts:
    """Build Muon, orthogonalised momentum for matrices (Jordan et al., 2024), by Newton-Schulz
    iterations in bfloat16.

    It trains only matrices, in Flax's layout (in, out), and raises ValueError at `init` for other
    parameters; use another optimizer for these. The `muon` of optax trains them with Adam.

    Args:
      lr: learning rate.
      weight_decay: decoupled weight decay.
      momentum: momentum decay.
      nesterov: use Nesterov momentum.
      ns_coefficients: coefficients of the quintic polynomial.
      eps: lower bound for the norm in the denominator.
      ns_steps: number of Newton-Schulz iterations.
      adjust_lr_fn: learning rate scale of a matrix: 'original' (None) multiplies lr by `sqrt(max(1,
        out / in))`, 'match_rms_adamw' by `0.2 sqrt(max(out, in))`.
    """
    return [
        (
            "scale_by_muon",
            scale_by_muon(momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn),
        )
    ]


@define_optimizer("lr", "betas", "weight_decay", decay="decoupled")
def Lion(
    lr: NonNegative = 1e-4,
    betas: tuple[Decay, Decay] = (0.9, 0.99),
    weight_decay: NonNegative = 0.0,
) -> Parts:
    """Build Lion, the sign of an interpolated momentum (Chen et al., arXiv:2302.06675), with
    decoupled weight decay.

    Args:
      lr: learning rate.
      betas: decay rates for the interpolation whose sign is the update, and for the momentum.
      weight_decay: weight decay coefficient.
    """
    return [("scale_by_lion", optax.scale_by_lion(*betas))]


class MuonState(NamedTuple):
    """Muon's state."""

    momentum: Updates  # float32, like the parameters


def scale_by_muon(
    momentum: Scalar,
    nesterov: bool,
    ns_coefficients: Sequence[float],
    eps: float,
    ns_steps: int,
    adjust_lr_fn: str | None,
) -> optax.GradientTransformation:
    """Orthogonalise the momentum of matrices in bfloat16.

    `optax.contrib.scale_by_muon` also corrects its bias.

    The arguments are those of `TorchMuon`.

    Raises:
      ValueError: at `init`, a parameter that is not a matrix.
    """

    def init(params: Params) -> MuonState:
        # At `init`, before the step is traced and compiled.
        for path, leaf in paths.flatten(params).items():
            if leaf.ndim != 2:
                raise ValueError(
                    f"TorchMuon: parameter {path!r} must be a matrix, got shape {leaf.shape}; use "
                    "another optimizer for it, or 'muon', which trains such parameters with Adam"
                )
        return MuonState(common.zeros_like(params))

    def update(
        grads: Updates, state: MuonState, params: Params | None = None
    ) -> tuple[Updates, MuonState]:
        average = common.moving_average(state.momentum, momentum, grads)
        # PyTorch's lerp of the gradient towards the new average, with its order of operations.
        ahead = (
            jax.tree.map(lambda b, g: g + momentum * (b - g), average, grads)
            if nesterov
            else average
        )

        def leaf(x: jax.Array) -> jax.Array:
            # Flax kernels are (in, out), PyTorch's weights (out, in): the factor of the paper is
            # rows over columns of the latter.
            inputs, outputs = x.shape
            if adjust_lr_fn == "match_rms_adamw":
                factor = 0.2 * max(inputs, outputs) ** 0.5
            else:
                factor = max(1.0, outputs / inputs) ** 0.5
            return factor * _orthogonalise(x, ns_coefficients, ns_steps, eps).astype(x.dtype)

        return jax.tree.map(leaf, ahead), MuonState(average)

    return optax.GradientTransformation(init, update)


def _orthogonalise(
    matrix: jax.Array, coefficients: Sequence[float], steps: int, eps: float
) -> jax.Array:
    a, b, c = coefficients
    x = matrix.astype(jnp.bfloat16)
    is_wide = x.shape[0] <= x.shape[1]
    x = x if is_wide else x.T  # the smaller Gram matrix
    x = x / jnp.maximum(jnp.linalg.norm(x), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if is_wide else x.T
