"""Define Muon with the formulas of torch.optim.Muon."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine import paths
from jengine.annotations import Finite, Fraction, NonNegative, Range
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Tree
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.registry import OPTIMIZERS

_ADJUSTMENTS = (None, "original", "match_rms_adamw")


@OPTIMIZERS.register_module()
def Muon(
    lr: NonNegative = 1e-3,
    weight_decay: NonNegative = 0.1,
    momentum: Fraction = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[Finite, Finite, Finite] = (3.4445, -4.775, 2.0315),
    eps: NonNegative = 1e-7,
    ns_steps: Annotated[int, Range(ge=1, lt=100)] = 5,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
) -> Optimizer:
    """Build Muon, orthogonalised momentum for matrices (Jordan et al., 2024), by Newton-Schulz iterations in bfloat16.

    It trains only matrices, in Flax's layout (in, out); use another optimizer for other parameters. The `muon` of optax
    trains these with Adam.

    Args:
      lr: learning rate.
      weight_decay: decoupled weight decay.
      momentum: decay of the momentum.
      nesterov: use Nesterov momentum.
      ns_coefficients: coefficients of the quintic polynomial.
      eps: minimum of the norm in the denominator.
      ns_steps: number of Newton-Schulz iterations.
      adjust_lr_fn: the scale of the learning rate of a matrix: 'original' (None) multiplies lr by
        `sqrt(max(1, out / in))`, 'match_rms_adamw' by `0.2 sqrt(max(out, in))`.

    Raises:
      ValueError: a setting outside its range; at `init`, a parameter that is not a matrix.
    """
    settings = {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_coefficients": tuple(ns_coefficients),
        "eps": eps,
        "ns_steps": ns_steps,
        "adjust_lr_fn": adjust_lr_fn,
    }
    return Optimizer("Muon", settings, _muon_parts, ("lr", "weight_decay", "momentum"), whole_tensor=True)


class MuonState(NamedTuple):
    """Hold the state of Muon."""

    momentum: Tree  # float32, like the parameters


def scale_by_muon(
    momentum: Any,
    nesterov: bool = True,
    ns_coefficients: Sequence[float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> optax.GradientTransformation:
    """Orthogonalise the momentum of matrices in bfloat16; `optax.contrib.scale_by_muon` also corrects its bias.

    Args:
      momentum: decay of the momentum.
      nesterov: use Nesterov momentum.
      ns_coefficients: coefficients of the quintic polynomial.
      eps: minimum of the norm in the denominator.
      ns_steps: number of Newton-Schulz iterations.
      adjust_lr_fn: the scale of the update of a matrix, see `Muon`.

    Raises:
      ValueError: at `init`, a parameter that is not a matrix.
    """

    def init(params: Tree) -> MuonState:
        for path, leaf in paths.flatten(params).items():
            if leaf.ndim != 2:
                raise ValueError(
                    f"Muon: parameter {path!r} must be a matrix, got shape {leaf.shape}; use another optimizer for it, "
                    "or 'muon', which trains such parameters with Adam"
                )
        return MuonState(common.zeros_like(params))

    def update(grads: Tree, state: MuonState, params: Tree = None) -> tuple[Tree, MuonState]:
        average = common.moving_average(state.momentum, momentum, grads)
        ahead = jax.tree.map(lambda b, g: g + momentum * (b - g), average, grads) if nesterov else average

        def leaf(x: Any) -> jax.Array:
            inputs, outputs = x.shape
            if adjust_lr_fn == "match_rms_adamw":
                factor = 0.2 * max(inputs, outputs) ** 0.5
            else:
                factor = max(1.0, outputs / inputs) ** 0.5
            return factor * _orthogonalise(x, ns_coefficients, ns_steps, eps).astype(x.dtype)

        return jax.tree.map(leaf, ahead), MuonState(average)

    return optax.GradientTransformation(init, update)


def _muon_parts(
    lr: Any, weight_decay: Any, momentum: Any, nesterov: bool, ns_coefficients: Sequence[float], eps: float,
    ns_steps: int, adjust_lr_fn: str | None,
) -> Parts:  # fmt: skip
    scale = [("scale_by_muon", scale_by_muon(momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn))]
    return common.chain_with_decay(scale, lr, weight_decay, decoupled=True)


def _orthogonalise(matrix: jax.Array, coefficients: Sequence[float], steps: int, eps: float) -> jax.Array:
    a, b, c = coefficients
    x = matrix.astype(jnp.bfloat16)
    is_wide = x.shape[0] <= x.shape[1]
    x = x if is_wide else x.T
    x = x / jnp.maximum(jnp.linalg.norm(x), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if is_wide else x.T
