"""Gradient clipping as in PyTorch, configured by the `clip_grad` of an optimizer wrapper."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.config.annotations import Range
from jengine.config.errors import config_path
from jengine.config.registry import check_arguments


class ClipByNormState(NamedTuple):
    """The gradient norm, for the log."""

    # float32[], or float64[] for gradients in float64: norm of the last gradients before clipping
    grad_norm: jax.Array


def clip_by_norm(max_norm: float, norm_type: float = 2.0) -> optax.GradientTransformation:
    """Scale all gradients so that the global p-norm, where p is `norm_type`, is at most `max_norm`.

    `optax.clip_by_global_norm` supports only the 2-norm and divides by the norm; PyTorch divides by
    the norm plus 1e-6.
    """

    def init(params: Any) -> ClipByNormState:
        return ClipByNormState(
            jnp.zeros((), jnp.result_type(jnp.float32, *jax.tree.leaves(params)))
        )

    def update(
        grads: Updates, state: ClipByNormState, params: Any | None = None
    ) -> tuple[Updates, ClipByNormState]:
        norm = global_norm(grads, norm_type)
        # A norm of NaN or infinity makes all gradients NaN or 0, as in PyTorch.
        factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
        clipped = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        return clipped, ClipByNormState(norm.astype(state.grad_norm.dtype))

    return optax.GradientTransformation(init, update)


def global_norm(grads: Updates, norm_type: float = 2.0) -> jax.Array:
    """Return the p-norm over all elements, float32[], where p is `norm_type`, `math.inf` for the
    maximum.

    >>> global_norm({"a": jnp.array([3.0]), "b": jnp.array([-4.0])}).item()
    5.0
    """
    # Squares of float16 gradients overflow above 256, and sums of bfloat16 round.
    leaves = [
        jnp.asarray(leaf, jnp.promote_types(jnp.float32, leaf.dtype))
        for leaf in jax.tree.leaves(grads)
    ]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    if math.isinf(norm_type):
        return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0) for leaf in leaves]))
    # A power with a variable exponent costs a log and an exp per element
    if norm_type == 2:
        return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in leaves))
    return sum(jnp.sum(jnp.abs(leaf) ** norm_type) for leaf in leaves) ** (1 / norm_type)


Threshold = Annotated[float, Range(gt=0, le=math.inf)]  # with inf the norm is only logged


class ClipByNorm(NamedTuple):
    """Clipping by norm: all gradients are scaled so that the global norm is at most `max_norm`."""

    max_norm: Threshold
    norm_type: Threshold | Literal["inf"] = 2.0
    error_if_nonfinite: Literal[False] = False  # a compiled step cannot raise


class ClipByValue(NamedTuple):
    """Clipping by value: every element is clamped to [-clip_value, clip_value]."""

    clip_value: Threshold


def parse_clip_grad(cfg: Mapping[str, Any] | None) -> ClipByNorm | ClipByValue | None:
    """Parse the `clip_grad` of an optimizer wrapper.

    Args:
      cfg: `dict(max_norm=, norm_type=2)` or `dict(clip_value=)`, with or without `type='norm'` or
        `'value'`; None for no clipping. It is not modified.

    Raises:
      TypeError: an unknown or a missing key, keys of both types, or a value that is not
        a number.
      ValueError: an unknown type, or an illegal value, such as a threshold of 0, which would stop
        training.
    """
    if cfg is None:
        return None
    # `foreach` only chooses an implementation in PyTorch; `_delete_` is for the merging of configs.
    keys = {k: v for k, v in cfg.items() if k not in ("type", "_delete_", "foreach")}
    kind = cfg.get("type") or ("value" if "clip_value" in keys else "norm")
    if kind not in ("norm", "value"):
        raise ValueError(f"`clip_grad.type` must be 'norm' or 'value', got {kind!r}")
    settings = ClipByNorm if kind == "norm" else ClipByValue
    with config_path("clip_grad"):
        check_arguments(settings, keys)
    return settings(**keys)


def clipping_parts(
    clip_grad: ClipByNorm | ClipByValue | None,
) -> list[tuple[str, optax.GradientTransformation]]:
    """Return the named parts of a chain that clip as configured; no part without clipping."""
    if clip_grad is None:
        return []
    if isinstance(clip_grad, ClipByNorm):
        return [("clip_by_norm", clip_by_norm(clip_grad.max_norm, float(clip_grad.norm_type)))]
    return [("clip", optax.clip(clip_grad.clip_value))]
