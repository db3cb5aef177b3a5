"""Adafactor as torch.optim.Adafactor defines it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class AdafactorState(NamedTuple):
    """State of Adafactor."""

    steps: jax.Array  # int32[], updates done
    rows: Tree  # float32[..., n, 1], mean squares along the last axis; the whole second moment of a vector or scalar
    columns: Tree  # float32[..., 1, m], mean squares along the last but one; float32[] for a vector or scalar


@OPTIMIZERS.register_module()
def Adafactor(
    lr: float = 1e-2,
    beta2_decay: float = -0.8,
    eps: Sequence[float | None] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Adafactor (Shazeer and Stern, arXiv:1804.04235), factored over the last two axes of each tensor.

    `optax.adafactor` factors the two largest axes, and those only from 128 on.

    Args:
      lr: the greatest relative step.
      beta2_decay: power of the step by which the second moment forgets.
      eps: floors, of the second moment's root (None: the precision of the dtype) and of the parameters' scale.
      d: the greatest root mean square of an update.
      weight_decay: decoupled decay.
      maximize: climb.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("Adafactor", lr=lr, weight_decay=weight_decay)
    core.in_range("Adafactor", low=1.0, d=d)
    if not beta2_decay <= 0:
        raise ValueError(f"Adafactor: beta2_decay must be at most 0, found {beta2_decay}")
    if len(eps) != 2 or (eps[0] is not None and eps[0] < 0) or eps[1] is None or eps[1] < 0:
        raise ValueError(f"Adafactor: eps must be (None or a number, a number), neither negative, found {eps!r}")
    settings = {
        "lr": lr,
        "beta2_decay": beta2_decay,
        "eps": tuple(eps),
        "d": d,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    return Optimizer("Adafactor", settings, _plan, whole_tensor=True)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    maximize = core.shared_flag("Adafactor", groups, "maximize")
    base_numbers = core.numbers_of("lr", "beta2_decay", "d", "weight_decay")

    def numbers(group: Mapping[str, Any]) -> dict[str, float]:
        floor, scale_floor = group["eps"]
        floor = float(jnp.finfo(jnp.float32).eps) if floor is None else floor
        return {**base_numbers(group), "eps1": floor, "eps2": scale_floor}

    def init(params: Tree) -> AdafactorState:
        zeros = core.zeros_like(params)
        rows = jax.tree.map(lambda z: z[..., :1] if z.ndim > 1 else z, zeros)
        columns = jax.tree.map(lambda z: z[..., :1, :] if z.ndim > 1 else jnp.zeros((), z.dtype), zeros)
        return AdafactorState(core.step_zero(), rows, columns)

    def update(grads: Tree, state: AdafactorState, params: Tree, hp: Numbers) -> tuple[Tree, AdafactorState]:
        """Steps by factored second moments, relative to the size of each parameter."""
        grads = core.negate(grads) if maximize else grads
        steps = state.steps + 1

        def leaf(
            g: Any, p: Any, row: Any, column: Any, lr: Any, beta2_decay: Any, eps1: Any, eps2: Any, d: Any, wd: Any
        ) -> tuple[Any, ...]:
            """The step of one parameter, and its moments by rows and columns."""
            t = steps.astype(row.dtype)
            scale = jnp.maximum(eps2, core.norm(p) / p.size**0.5)
            rate = scale * jnp.minimum(lr, jax.lax.rsqrt(t))
            forget = t**beta2_decay
            square = g * g
            if g.ndim > 1:
                row = row + forget * (jnp.mean(square, -1, keepdims=True) - row)
                column = column + forget * (jnp.mean(square, -2, keepdims=True) - column)
                variance = row * column / jnp.maximum(jnp.mean(row, -2, keepdims=True), eps1)
            else:
                row = row + forget * (square - row)
                variance = row
            direction = g * jax.lax.rsqrt(jnp.maximum(variance, eps1**2))
            excess = jnp.maximum(1, core.norm(direction) / (g.size**0.5 * d))
            return -rate / excess * direction - lr * wd * p, row, column

        names = ("lr", "beta2_decay", "eps1", "eps2", "d", "weight_decay")
        rows_out = jax.tree.map(leaf, grads, params, state.rows, state.columns, *(hp[name] for name in names))
        updates, rows, columns = core.unzip(rows_out, grads, 3)
        return updates, AdafactorState(steps, rows, columns)

    return Core(init, update, numbers)


# the name under which MMEngine registers it
OPTIMIZERS.register_module(name="TorchAdafactor")(Adafactor)
