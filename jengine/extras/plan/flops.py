"""FLOPs of the matrix products and convolutions in a traced function."""

import math
from typing import Any

import jax
import numpy as np

from jengine.train.jaxpr_hash import inner_jaxprs

Flops = dict[str, float]


def count_flops(jaxpr: Any) -> Flops:
    """Count the FLOPs in matrix products and convolutions.

    Each term is a multiplication and an addition.

    XLA's `cost_analysis` counts one loop iteration; here all iterations of a `scan` are counted.
    For a `while`, whose length is unknown, one iteration is counted; for a `cond` the longest
    branch; for a map over devices all devices. Operations that `jax.checkpoint` repeats count
    twice. Custom kernels (Pallas, cuDNN attention) are not counted.

    >>> x = jax.ShapeDtypeStruct((2, 3), "float32")
    >>> count_flops(jax.jit(lambda x: x @ x.T).trace(x).jaxpr)
    {'float32': 24.0}

    Args:
      jaxpr: the traced function, `jax.jit(fn).trace(*args).jaxpr`.

    Returns:
      FLOPs by the wider operand's dtype: 'bfloat16', 'float16', 'float32' and so on; with '
      highest' appended for float32 at full precision.
    """
    flops: Flops = {}
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for dtype, count in _count_equation(eqn).items():
            flops[dtype] = flops.get(dtype, 0.0) + count
    return flops


def _count_equation(eqn: Any) -> Flops:
    name = eqn.primitive.name
    if name in _COUNTERS:
        return {_operand_dtype(eqn): _COUNTERS[name](eqn)}
    inner = [count_flops(jaxpr) for jaxpr in inner_jaxprs(eqn.params)]  # of a scan, a jit, a remat
    if name == "cond":  # an upper bound
        return max(inner, key=lambda branch: sum(branch.values()))
    repetitions = _repetitions(eqn)
    dtypes = {dtype for flops in inner for dtype in flops}
    return {dtype: repetitions * sum(flops.get(dtype, 0.0) for flops in inner) for dtype in dtypes}


def _count_dot(eqn: Any) -> float:
    left = eqn.invars[0].aval.shape
    (out,) = eqn.outvars
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2.0 * math.prod(out.aval.shape) * math.prod(left[axis] for axis in contracted)


def _count_ragged_dot(eqn: Any) -> float:
    left = eqn.invars[0].aval.shape
    groups = eqn.invars[2].aval.shape[-1]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    total = (
        2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    )
    # with a ragged contracted dimension each group sums over its own part of it
    return total / groups if set(numbers.lhs_ragged_dimensions) & set(contracted) else total


def _count_convolution(eqn: Any) -> float:
    """Return XLA's count, without multiplications by padding and by zeros in a dilated input."""
    left, right = (var.aval.shape for var in eqn.invars)
    out = eqn.outvars[0].aval.shape
    params = eqn.params
    lhs, rhs, result = (
        getattr(params["dimension_numbers"], f"{name}_spec") for name in ("lhs", "rhs", "out")
    )
    # Counted exactly, by dimension: products with padding or with the holes of a dilation do not
    # count.
    taps = 1
    for i, (stride, (low, _), dilation, spread) in enumerate(
        zip(
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    ):
        positions = np.arange(out[result[i + 2]])[:, None] * stride - low
        positions = positions + np.arange(right[rhs[i + 2]]) * spread
        inside = (
            (positions >= 0)
            & (positions < (left[lhs[i + 2]] - 1) * dilation + 1)
            & (positions % dilation == 0)
        )
        taps *= int(inside.sum())
    batch = out[result[0]]
    features = out[result[1]]
    return 2.0 * taps * batch * features * right[rhs[1]]


_COUNTERS = {
    "dot_general": _count_dot,
    "conv_general_dilated": _count_convolution,
    "ragged_dot_general": _count_ragged_dot,
}


def _operand_dtype(eqn: Any) -> str:
    dtype = max((var.aval.dtype for var in eqn.invars[:2]), key=lambda dtype: dtype.itemsize)
    precision = eqn.params.get("precision")
    highest = jax.lax.Precision.HIGHEST
    is_full = precision is highest or (isinstance(precision, tuple) and highest in precision)
    return f"{dtype.name} highest" if is_full and dtype == np.float32 else dtype.name


def _repetitions(eqn: Any) -> int:
    """Return how often an equation's inner jaxpr runs, over all devices."""
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"])
    if eqn.primitive.name == "shard_map":  # its jaxpr has the shapes of one device
        return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    return 1


def step_flops(programs: Any) -> Flops:
    """Return per-iteration FLOPs over all devices for the programs of a run, see `count_flops`.

    {} before the first iteration.
    """
    for kind, shapes in programs.called().items():
        jaxpr = programs.compiled[kind].trace(*shapes).jaxpr
        # `is_update` has one entry per step
        steps = len(shapes[2][1]) if kind == "chunk" else 1
        return {dtype: count / steps for dtype, count in count_flops(jaxpr).items()}
    return {}
