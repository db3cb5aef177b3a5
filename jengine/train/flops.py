"""Count floating-point operations of a traced function: those of its matrix products and convolutions."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

Flops = dict[str, float]


def count_flops(jaxpr: Any) -> Flops:
    """Count the operations of matrix products and convolutions, a multiplication and an addition each.

    XLA's own count (`cost_analysis`) counts one iteration of a loop; here a `scan` counts all of them. A `while`,
    whose iterations are unknown, counts one, a `cond` its longest branch, and a map over devices all of them. The work
    that `jax.checkpoint` repeats counts twice. Custom kernels (Pallas, cuDNN attention) are not counted.

    Args:
      jaxpr: of a traced function, `jax.jit(fn).trace(*args).jaxpr`.

    Returns:
      Operations by operand dtype: 'bfloat16', 'float16', 'float32' and so on, the wider of the two operands; with
      ' highest' where full precision is requested of float32.
    """
    flops: Flops = {}
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for kind, count in _of(eqn).items():
            flops[kind] = flops.get(kind, 0.0) + count
    return flops


def _of(eqn: Any) -> Flops:
    name = eqn.primitive.name
    if name in _COUNTED:
        return {_kind(eqn): _COUNTED[name](eqn)}
    inner = [count_flops(jaxpr) for jaxpr in _inner(eqn.params)]
    if name == "cond":
        return max(inner, key=lambda branch: sum(branch.values()))
    times, kinds = _times(eqn), {kind for flops in inner for kind in flops}
    return {kind: times * sum(flops.get(kind, 0.0) for flops in inner) for kind in kinds}


def _dot(eqn: Any) -> float:
    left, (out,) = eqn.invars[0].aval.shape, eqn.outvars
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2.0 * math.prod(out.aval.shape) * math.prod(left[axis] for axis in contracted)


def _ragged_dot(eqn: Any) -> float:
    left, groups = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape[-1]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    whole = 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    # a group sums over its own rows only
    return whole / groups if set(numbers.lhs_ragged_dimensions) & set(contracted) else whole


def _convolution(eqn: Any) -> float:
    """Return the count of XLA: without multiplications by padding and by the holes of a dilated input."""
    left, right = (var.aval.shape for var in eqn.invars)
    out, params = eqn.outvars[0].aval.shape, eqn.params
    lhs, rhs, result = (getattr(params["dimension_numbers"], f"{name}_spec") for name in ("lhs", "rhs", "out"))
    taps = 1
    for i, (stride, (low, _), dilation, spread) in enumerate(
        zip(params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"], strict=True)
    ):
        places = np.arange(out[result[i + 2]])[:, None] * stride - low
        places = places + np.arange(right[rhs[i + 2]]) * spread
        inside = (places >= 0) & (places < (left[lhs[i + 2]] - 1) * dilation + 1) & (places % dilation == 0)
        taps *= int(inside.sum())
    batch, features = out[result[0]], out[result[1]]
    return 2.0 * taps * batch * features * right[rhs[1]]


_COUNTED = {"dot_general": _dot, "conv_general_dilated": _convolution, "ragged_dot_general": _ragged_dot}


def _kind(eqn: Any) -> str:
    dtype = max((var.aval.dtype for var in eqn.invars[:2]), key=lambda dtype: dtype.itemsize)
    precision = eqn.params.get("precision")
    highest = jax.lax.Precision.HIGHEST
    full = precision is highest or (isinstance(precision, tuple) and highest in precision)
    return f"{dtype.name} highest" if full and dtype == np.float32 else dtype.name


def _times(eqn: Any) -> int:
    """Return how often the inner program of an equation runs, over all devices."""
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"])
    if eqn.primitive.name == "shard_map":
        return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    return 1


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else [value]:
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item
