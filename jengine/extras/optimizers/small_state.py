"""Moments of optimizers in 16 or 8 bits, with stochastic rounding."""

import dataclasses
import itertools
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, KeyPath
from optax import OptState, Params, Updates

from jengine.config.errors import ConfigError
from jengine.extras.optimizers.matrices import set_explicit
from jengine.optim.optimizers.common import Parts, zero_count
from jengine.optim.optimizers.optimizer import Optimizer

StateDtype: TypeAlias = Literal["float32", "bfloat16", "int8"]
_DTYPES = ("float32", "bfloat16", "int8")
# Fields with a number for each parameter: those that may be negative, and averages of squares.
_MEANS = ("mu", "trace", "momentum", "delta")
_SQUARES = ("nu", "nu_max")
_LEAST_SIZE = 4096  # of a parameter whose moments are rounded, as in the paper
_BLOCK = 256  # elements along the last axis with one scale
_DECADES = 7


def store_small(optimizer: Optimizer, dtype: StateDtype) -> Optimizer:
    """Return an optimizer with moments in a small dtype.

    `state_dtype` becomes a setting of its parameter groups.

    Args:
      optimizer: any optimizer with moments.
      dtype: see `compress_moments`; 'float32' changes nothing.
    """

    def parts(*, state_dtype: StateDtype, **settings: Any) -> Parts:
        chain = optimizer.parts(**settings)
        if state_dtype not in _DTYPES:
            raise ConfigError(
                f"`optimizer.state_dtype` must be one of {', '.join(_DTYPES)}, got {state_dtype!r}"
            )
        if state_dtype == "float32":
            return chain
        return [("small_state", compress_moments(optax.named_chain(*chain), state_dtype))]

    defaults = {**optimizer.defaults, "state_dtype": dtype}
    return dataclasses.replace(optimizer, defaults=defaults, parts=parts)


class SmallState(NamedTuple):
    """State of `compress_moments`."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    # that of the optimizer, with moments in bfloat16, or codes in int8 and uint8
    inner_state: OptState
    # float32 for 256 codes along the last axis, like the moments; None where there is no moment
    scales: OptState


def compress_moments(
    inner: optax.GradientTransformation, dtype: StateDtype
) -> optax.GradientTransformationExtraArgs:
    """Keep the moments of a transformation in 16 or 8 bits between the updates, which are computed
    in float32 (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861).

    The means of rounded moments are right: a value is rounded up or down at random, by how near it
    is. The random numbers depend on the number of the update alone, so that a resumed run goes on
    as an uninterrupted one, and replicas stay equal.

    >>> params = {"w": jnp.ones((64, 256))}
    >>> state = compress_moments(optax.scale_by_adam(), "int8").init(params)
    >>> state.inner_state.mu["w"].dtype, state.scales.mu["w"].shape
    (dtype('int8'), (64, 1))

    Args:
      inner: a transformation with fields `mu`, `nu`, `trace` or `momentum` in its state.
      dtype: 'bfloat16', or 'int8' for one of 255 values between -1 and 1, or from 0 to 1 for
        squares, times the largest one among 256 elements. Parameters with less than 4096 elements
        keep float32.

    Raises:
      ConfigError: from `init`, another dtype, or a transformation without moments.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Params) -> SmallState:
        state = inner.init(params)
        kinds = [kind for kind, _ in _list_moments(state)]
        if not any(kinds):
            raise ConfigError(
                "`optimizer.state_dtype` must be 'float32' for an optimizer without moments "
                f"({', '.join((*_MEANS, *_SQUARES))} in its state), got {dtype!r}"
            )
        # XLA would compute the codes of these constants as it compiles, which takes minutes
        return _compress(jax.lax.optimization_barrier(state), zero_count(), dtype)

    def update(
        grads: Updates, state: SmallState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, SmallState]:
        updates, new = inner.update(grads, _expand(state), params, **extra)
        return updates, _compress(new, state.count + 1, dtype)

    return optax.GradientTransformationExtraArgs(init, update)


def _list_moments(state: OptState) -> list[tuple[str | None, Any]]:
    """Return the field of each leaf of a state, None if it is no moment, and the leaf."""

    def kind(path: KeyPath) -> str | None:
        fields = [key.name for key in path if isinstance(key, GetAttrKey)]
        return next((name for name in fields if name in (*_MEANS, *_SQUARES)), None)

    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return [(kind(path), leaf) for path, leaf in leaves]


def _compress(state: OptState, count: jax.Array, dtype: str) -> SmallState:
    key = jax.random.fold_in(jax.random.key(0), count)
    leaves: list[Any] = []
    scales: list[Any] = []
    for index, (kind, x) in enumerate(_list_moments(state)):
        is_moment = kind is not None and x.dtype.itemsize < 8
        if is_moment:
            x = x.astype(jnp.float32)
        scale = None
        if is_moment and dtype == "int8":
            scale = jnp.ones(x.shape[:1] + (1,) * (x.ndim - 1))  # of one that stays
        if is_moment and x.size >= _LEAST_SIZE:
            own = jax.random.fold_in(key, index)
            if dtype == "bfloat16":
                x = round_to_bfloat16(x, own)
            else:
                x, scale = encode(x, own, is_square=kind in _SQUARES)
        leaves.append(x)
        scales.append(scale)
    treedef = jax.tree.structure(state)
    return SmallState(
        count, jax.tree.unflatten(treedef, leaves), jax.tree.unflatten(treedef, scales)
    )


def _expand(state: SmallState) -> OptState:
    """Return the state of the optimizer, in float32."""
    # none in bfloat16
    scales = itertools.chain(jax.tree.leaves(state.scales), itertools.repeat(jnp.ones(())))
    leaves = []
    for kind, x in _list_moments(state.inner_state):
        if kind is not None and x.dtype.itemsize < 8:
            scale = next(scales)
            if x.dtype in (jnp.int8, jnp.uint8):
                x = decode(x, scale)
            x = x.astype(jnp.float32)
        leaves.append(x)
    return jax.tree.unflatten(jax.tree.structure(state.inner_state), leaves)


def round_to_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return float32 values rounded up or down at random, with the right mean."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def encode(x: jax.Array, key: jax.Array, is_square: bool) -> tuple[jax.Array, jax.Array]:
    """Return codes like `x`, int8 or uint8 for squares, and scales, float32[..., blocks along the
    last axis].

    Codes are the paper's dynamic trees: each of seven decades below the largest element has twice
    as many equal steps as the next smaller one, of which the last reaches to 0.

    Args:
      x: float32[..., n].
      key: random key for the rounding.
      is_square: whether the values are at least 0 and divide something.
    """
    spec = jax.typeof(x).sharding.spec
    x = set_explicit(x, PartitionSpec(*spec[:-1]))
    blocks = _split(x)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    # without a division by 0, and NaN stays NaN
    y = jnp.abs(blocks / jnp.where(scales == 0, 1, scales)[..., None])
    y = y.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    # a sum of comparisons and not a logarithm, which is not exact at the ends of the decades
    decade = jnp.zeros(y.shape, jnp.int32)
    for i in range(1, _DECADES):
        decade += y <= 10.0**-i
    steps = _count_steps(decade, is_square)
    low, high = _limits(decade)
    place = (y - low) / (high - low) * steps
    code = jnp.floor(place + jax.random.uniform(key, x.shape)) + steps - 1 - is_square
    if is_square:  # what was above 0 must not divide as 0
        codes = jnp.where(y > 0, jnp.maximum(code, 1), 0).astype(jnp.uint8)
    else:
        codes = (jnp.sign(x) * code).astype(jnp.int8)
    return set_explicit(codes, spec), scales


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the float32 values of codes; see `encode`."""
    spec = jax.typeof(codes).sharding.spec
    codes = set_explicit(codes, PartitionSpec(*spec[:-1]))
    is_square = codes.dtype == jnp.uint8
    code = codes.astype(jnp.int32)
    number = jnp.abs(code) + is_square  # in a decade from the count of its steps on
    decade = jax.lax.clz(number) - (25 - is_square)
    decade = jnp.minimum(decade, _DECADES - 1)
    steps = _count_steps(decade, is_square)
    low, high = _limits(decade)
    y = low + (high - low) * ((number + 1) / steps - 1)
    y = jnp.sign(code) * y
    blocks = _split(y) * scales[..., None]
    return set_explicit(blocks.reshape(*codes.shape[:-1], -1)[..., : codes.shape[-1]], spec)


def _count_steps(decade: jax.Array, is_square: bool) -> jax.Array:
    return 2 ** (_DECADES - 1 - decade + is_square)


def _limits(decade: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the ends of a decade; the last one begins at 0."""
    low, high = (jnp.zeros(decade.shape, jnp.float32) for _ in range(2))
    for i in range(_DECADES):
        high = jnp.where(decade == i, 10.0**-i, high)
        low = jnp.where(decade == i, 10.0 ** -(i + 1) if i < _DECADES - 1 else 0.0, low)
    return low, high


def _split(x: jax.Array) -> jax.Array:
    """Return an array with the last axis split into blocks, filled up with zeros."""
    size = min(_BLOCK, x.shape[-1])
    padding = -x.shape[-1] % size
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return padded.reshape(*x.shape[:-1], -1, size)
