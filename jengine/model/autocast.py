"""Low precision for a network: cast parameters and inputs, and the outputs back to float32.

Only the network call is cast, so targets and the loss stay in float32. `compute_in` sets the dtype
for a loss or a prediction, and `autocast` wraps the network call inside it. As with
`jax.default_matmul_precision`, the dtype is read while tracing and is part of the compiled program.
"""

import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxpr_as_fun, jaxprs_in_params
from jax.typing import ArrayLike, DTypeLike

from jengine.model.model import Params, PyTree

_DTYPE: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "jengine_compute_dtype", default=None
)
# What low precision speeds up. Other operations may be in float32 on purpose, as in norms.
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def autocast(apply_fn: Callable[..., Any], dtype: str | None = None) -> Callable[..., Any]:
    """Wrap the call to a network so that it computes in the precision policy's dtype.

    Use it in the `loss` and `predict` of a custom `Model` and in the functions for a
    `FunctionalModel`; `LinenModel` and `NnxModel` do so themselves. Without a policy (`precision=`,
    `AmpOptimWrapper`) the returned function behaves like `apply_fn`.

    >>> double = autocast(lambda x: 2 * x, dtype="bfloat16")
    >>> double(jnp.float32(1.001)).item()  # computed in bfloat16, returned in float32
    2.0

    Args:
      apply_fn: `(params, *inputs, **inputs) -> outputs`, such as a Linen module's `apply`.
        Floating-point arguments are cast, but not variables in its closure. If the first argument
        is a dict with Linen variables, `{'params': ..., 'batch_stats': ...}`, only `params` is
        cast: running statistics stay in float32.
      dtype: the dtype to compute in; the policy's by default.

    Returns:
      A function like `apply_fn` with floating-point outputs in float32 (float64 if the dtype is
      float64).
    """

    def cast_call(*args: Any, **kwargs: Any) -> Any:
        # Read at the call, not when wrapping: a model is built before the policy is set.
        compute_dtype = current_dtype() if dtype is None else dtype
        if compute_dtype is None:
            return apply_fn(*args, **kwargs)
        if args and isinstance(args[0], Mapping) and "params" in args[0]:
            variables = {**args[0], "params": cast_floating(args[0]["params"], compute_dtype)}
            args = (variables, *cast_floating(args[1:], compute_dtype))
        else:
            args = cast_floating(args, compute_dtype)
        # Keyword arguments such as `rngs` and `train` hold no floating-point arrays, and stay as
        # they are.
        outputs = apply_fn(*args, **cast_floating(kwargs, compute_dtype))
        return cast_floating(outputs, "float64" if compute_dtype == "float64" else "float32")

    return cast_call


def current_dtype() -> str | None:
    """Return the current policy's dtype; None without a policy."""
    return _DTYPE.get()


def compute_in(dtype: str, fn: Callable[[Params], Any], params: Params) -> Any:
    """Return `fn(params)`, a traceable function such as a loss, where each `autocast` computes in
    `dtype`.

    An inner `compute_in` takes precedence.

    Raises:
      ValueError: `dtype` is narrower than float32, but all matrix products and convolutions in `fn`
        are in float32.
    """
    outer = current_dtype()  # that of an enclosing policy
    token = _DTYPE.set(dtype)
    try:
        # the outermost policy checks all products
        if not _is_low(dtype) or (outer is not None and _is_low(outer)):
            return fn(params)
        # Gradients flow through: the jaxpr is evaluated on `params`, which may be tracers of
        # `jax.grad`.
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(params)
    except jax.errors.ConcretizationTypeError:
        # `fn` is not jitted and has Python control flow on parameters
        return fn(params)
    finally:
        _DTYPE.reset(token)
    # Looked for in the program: whether a network casts its inputs back cannot be seen from
    # outside.
    products = set(_product_dtypes(jaxpr.jaxpr))
    if products and not any(map(_is_low, products)):
        raise ValueError(
            f"the loss or prediction must compute the network in {dtype}, got "
            f"{' and '.join(sorted(map(str, products)))} in all of its matrix products and "
            "convolutions; call the network as `outputs = wrapper.autocast(apply_fn)(params, "
            "inputs)` in a custom loop, or as `outputs = jengine.model.autocast(apply_fn)(params, "
            "inputs)` in a Model, and compute the loss from these float32 outputs"
        )
    # calling `fn` would trace it a second time
    outputs = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(params))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def cast_floating(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Return `tree` with floating-point arrays cast to `dtype`.

    Other leaves, including Python numbers, stay.
    """
    # Python numbers are weakly typed: they take the dtype of the array that they are combined with.
    return jax.tree.map(lambda x: jnp.asarray(x).astype(dtype) if _is_floating(x) else x, tree)


def cast_floating_like(tree: PyTree, like: PyTree) -> PyTree:
    """Return `tree` with its floating-point arrays in the dtypes of `like`.

    With another structure, as it is.
    """
    structure: Any = jax.tree.structure(tree)
    if structure != jax.tree.structure(like):
        return tree  # the training step refuses it, with the path
    return jax.tree.map(
        lambda x, y: x.astype(y.dtype) if _is_floating(x) and _is_floating(y) else x, tree, like
    )


def at_least_float32(value: ArrayLike) -> jax.Array:
    """Return an array or a number in float32, or in float64 if it has that dtype, for sums and
    means.
    """
    array = jnp.asarray(value)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _is_floating(leaf: object) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _is_low(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype).itemsize < 4


def _product_dtypes(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the wider operand dtype for each matrix product and convolution, including inner
    jaxprs.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _PRODUCTS:
            avals: list[Any] = [var.aval for var in eqn.invars[:2]]
            # One float32 operand makes the whole product float32.
            yield max((aval.dtype for aval in avals), key=lambda dtype: dtype.itemsize)
        for inner in jaxprs_in_params(eqn.params):
            yield from _product_dtypes(inner)
