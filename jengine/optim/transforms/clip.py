"""Clip gradients by norm as PyTorch does, and read the `clip_grad` of an optimizer wrapper."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.errors import closest

PyTree = Any


class ClipByNormState(NamedTuple):
    """Hold the norm for the log."""

    grad_norm: jax.Array  # float32[], norm of the last gradients before clipping


def clip_by_norm(max_norm: float, norm_type: float = 2.0) -> optax.GradientTransformation:
    """Scale all gradients so that their common p-norm is at most `max_norm`.

    `optax.clip_by_global_norm` knows the 2-norm alone and divides by the norm, PyTorch by the norm plus 1e-6.

    Args:
      max_norm: the largest norm.
      norm_type: the p of the norm; `math.inf` for the largest magnitude.
    """

    def init(params: PyTree) -> ClipByNormState:
        return ClipByNormState(jnp.zeros((), jnp.float32))

    def update(grads: PyTree, state: ClipByNormState, params: PyTree = None) -> tuple[PyTree, ClipByNormState]:
        norm = global_norm(grads, norm_type)
        factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
        clipped = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        return clipped, ClipByNormState(norm.astype(jnp.float32))

    return optax.GradientTransformation(init, update)


def global_norm(grads: PyTree, norm_type: float = 2.0) -> jax.Array:
    """Return the norm of all elements of all leaves together, float32[].

    Args:
      grads: pytree of floating arrays.
      norm_type: the p of the p-norm; `math.inf` for the largest magnitude.
    """
    leaves = [jnp.asarray(leaf, jnp.promote_types(jnp.float32, leaf.dtype)) for leaf in jax.tree.leaves(grads)]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    if math.isinf(norm_type):
        return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0) for leaf in leaves]))
    if norm_type == 2:
        return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in leaves))
    if norm_type == 1:
        return jnp.asarray(sum(jnp.sum(jnp.abs(leaf)) for leaf in leaves))
    return sum(jnp.sum(jnp.abs(leaf) ** norm_type) for leaf in leaves) ** (1 / norm_type)


_ARGUMENTS = {"norm": ("max_norm", "norm_type"), "value": ("clip_value",)}


class ClipByNorm(NamedTuple):
    """Describe clipping by norm: scale all gradients so that their common norm is at most `max_norm`."""

    max_norm: float
    norm_type: float = 2.0


class ClipByValue(NamedTuple):
    """Describe clipping by value: clamp every element to [-clip_value, clip_value]."""

    clip_value: float


def parse_clip_grad(cfg: Mapping[str, Any] | None) -> ClipByNorm | ClipByValue | None:
    """Read the `clip_grad` of an optimizer wrapper.

    Args:
      cfg: `dict(max_norm=, norm_type=2)` or `dict(clip_value=)`, with or without `type='norm'` or `'value'`; None
        for no clipping. It is left as it was.

    Raises:
      AssertionError: empty, or a dict of nothing but its type. TypeError: no dict.
      ValueError: unknown type or key, keys of both kinds, or a value outside its range.
    """
    if cfg is None:
        return None
    if not isinstance(cfg, Mapping) and not hasattr(cfg, "items"):
        raise TypeError(f"clip_grad must be a dict or None, found {type(cfg).__name__}: {cfg!r}")
    keys = {k: v for k, v in cfg.items() if k not in ("type", "_delete_", "foreach")}
    if not keys:
        raise AssertionError("clip_grad must not be empty: give max_norm (and norm_type), or clip_value, or None")
    kind = cfg.get("type") or ("value" if "clip_value" in keys else "norm")
    if kind not in _ARGUMENTS:
        raise ValueError(f"clip_grad: type must be 'norm' or 'value', found {kind!r}")
    if "clip_value" in keys and "max_norm" in keys:
        raise ValueError("clip_grad: give either max_norm or clip_value, found both")
    if keys.pop("error_if_nonfinite", False):
        raise ValueError("clip_grad: a compiled step cannot raise; watch the loss with CheckInvalidLossHook instead")
    for key in keys:
        if key not in _ARGUMENTS[kind]:
            raise ValueError(f"clip_grad of type {kind!r} has no {key!r}{closest(str(key), _ARGUMENTS[kind])}")
    if kind == "value":
        return ClipByValue(_positive("clip_value", keys.get("clip_value")))
    norm_type = float(keys.get("norm_type", 2.0))
    if not norm_type > 0:
        raise ValueError(f"clip_grad: norm_type must be above 0 or 'inf', found {norm_type}")
    return ClipByNorm(_positive("max_norm", keys.get("max_norm")), norm_type)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ValueError(f"clip_grad: {name} must be a number of at least 0, found {value!r}")
    return float(value)
