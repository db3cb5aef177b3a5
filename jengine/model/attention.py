"""Attention with the implementation that suits the device: splash attention, cuDNN, or blocks of queries."""

import functools
import logging
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jengine.model.constrain import axes_of_type

BATCH = ("data", "fsdp", "expert")  # axes of the mesh over which examples are sharded
HEADS = "tensor"  # axis of the mesh over which heads are sharded
Implementation = Literal["auto", "splash", "cudnn", "blocks", "plain"]

_logger = logging.getLogger(__name__)

_BLOCKS = 16  # at most so many blocks of queries: each is compiled
_MIN_QUERIES = 256
_SPLASH_BLOCK = 512  # rows and columns of a tile; larger ones do not fit into a v5e's memory of the core
_LANES = 128


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = True,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Return the attention of tokens to tokens in the same sequence.

    >>> x = jax.random.normal(jax.random.key(0), (2, 6, 4, 8))
    >>> attend(x, x[:, :, :2], x[:, :, :2]).shape
    (2, 6, 4, 8)

    Args:
      query: f[B, T, H, K].
      key, value: f[B, T, G, K]; each head is for H / G heads of queries.
      causal: whether a token attends to itself and earlier tokens only.
      segment_ids: int[B, T]; a token attends to tokens with its own number only, as in packed sequences.
      window: number of tokens that a token attends to, itself included; None for all. Only with `causal`.
      implementation: 'splash' for the Pallas kernel for TPUs, 'cudnn' for that for NVIDIA GPUs, 'blocks' for parts of
        the queries, each with the keys that it attends to; 'plain' for all scores at once. 'auto' chooses 'splash' and
        'cudnn' where these accept the arguments, and 'blocks' otherwise.

    Returns:
      f[B, T, H, K], with the dtype of `query`.

    Raises:
      ValueError: heads that do not divide each other, or an implementation that does not accept the arguments.

    Sources: Dao et al. 2022 (blocks of queries and keys); Ainslie et al. 2023 (shared keys and values).
    """
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"attend: heads must be a multiple of those of `key`, got {query.shape[2]} and {key.shape[2]}")
    if window is not None and not causal:
        raise ValueError("attend: `window` must be None without `causal`, which it belongs to")
    options: dict[str, Any] = dict(causal=causal, segment_ids=segment_ids, window=window)
    if implementation == "auto":
        implementation = choose_implementation(query, segment_ids)
        if implementation == "cudnn":
            try:
                return _attend_dense(query, key, value, implementation="cudnn", **options)
            except (RuntimeError, ValueError, NotImplementedError) as error:  # its version, the GPU, sizes
                _warn_without_cudnn(str(error))
                implementation = "blocks"
    if implementation == "splash":
        return _attend_splash(query, key, value, **options)
    if implementation == "cudnn":
        return _attend_dense(query, key, value, implementation="cudnn", **options)
    if implementation == "blocks" and causal and query.shape[1] > _MIN_QUERIES:
        return _attend_blocks(query, key, value, segment_ids, window)
    return _attend_dense(query, key, value, implementation="xla", **options)


def choose_implementation(query: jax.Array, segment_ids: jax.Array | None = None) -> Implementation:
    """Return the implementation for a query f[B, T, H, K] on the devices that the step is compiled for.

    Those are the devices of the mesh, which may be of another kind than this machine's, as in `jengine plan`.
    """
    platform = _platform()
    if platform == "tpu" and query.shape[1] % _LANES == 0:
        return "splash"
    # cuDNN takes a mask of segments as a bias, with all scores in memory, so blocks are better then.
    is_half = query.dtype in (jnp.bfloat16, jnp.float16)
    return "cudnn" if platform in ("gpu", "cuda") and is_half and segment_ids is None else "blocks"


@functools.cache  # once for each reason
def _warn_without_cudnn(reason: str) -> None:
    _logger.warning("attention is computed in blocks, slower than by cuDNN: %s", reason)


def _platform() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _attend_dense(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    segment_ids: jax.Array | None,
    window: int | None,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    mask = None if segment_ids is None else _same_segment(segment_ids, segment_ids)
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=causal, local_window_size=local, implementation=implementation
    )


def _attend_blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None, window: int | None
) -> jax.Array:
    """Compute the scores for a block of queries at a time, and again in the backward pass.

    The slices of keys are static, so later keys cost nothing: half of the scores without a window. A loop with one
    size of slices for all blocks would compute them all.
    """
    length = query.shape[1]
    size = max(_MIN_QUERIES, -(-length // _BLOCKS))

    @functools.partial(jax.checkpoint, static_argnums=(0, 1, 2))
    def attend_block(
        first: int,
        start: int,
        stop: int,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: jax.Array | None,
    ) -> jax.Array:
        positions = jnp.arange(start, stop)[:, None]
        distance = positions - jnp.arange(first, stop)
        mask = (distance >= 0) & (distance < (length if window is None else window))
        mask = mask[None, None]
        if segments is not None:
            mask = mask & _same_segment(segments[:, start - first :], segments)
        return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")

    parts = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = 0 if window is None else max(0, start - window + 1)
        keys = slice(first, stop)
        segments = None if segment_ids is None else segment_ids[:, keys]
        parts.append(attend_block(first, start, stop, query[:, start:stop], key[:, keys], value[:, keys], segments))
    return jnp.concatenate(parts, axis=1)


def _same_segment(queries: jax.Array, keys: jax.Array) -> jax.Array:
    return (queries[:, :, None] == keys[:, None, :])[:, None]


def _attend_splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    segment_ids: jax.Array | None,
    window: int | None,
) -> jax.Array:
    """Run the Pallas kernel on each device: XLA cannot divide a kernel, so batch and heads are mapped here."""
    mesh = jax.sharding.get_abstract_mesh()
    attend_local = functools.partial(_attend_splash_local, causal=causal, window=window)
    mapped_axes = axes_of_type(mesh, AxisType.Auto)
    if not mapped_axes:
        return attend_local(query, key, value, segment_ids)
    batch = _divisors(mesh, BATCH, query.shape[0])
    heads = _divisors(mesh, (HEADS,), key.shape[2])
    arrays, segments = P(batch, None, heads, None), None if segment_ids is None else P(batch, None)
    mapped = jax.shard_map(
        attend_local,
        in_specs=(arrays, arrays, arrays, segments),
        out_specs=arrays,
        axis_names=mapped_axes,  # the others too: Mosaic refuses to divide a kernel
        check_vma=False,  # the kernel's results have no type of varying axes
    )
    return mapped(query, key, value, segment_ids)


def _divisors(mesh: AbstractMesh, names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Return those axes of the mesh that XLA shards, if they divide `size`."""
    automatic = axes_of_type(mesh, AxisType.Auto)
    found = tuple(name for name in names if name in automatic)
    return found if size % math.prod(mesh.shape[name] for name in found) == 0 else ()


def _attend_splash_local(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    *,
    causal: bool,
    window: int | None,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, length, heads, size = query.shape
    if length % _LANES:
        raise ValueError(
            f"attend: the number of tokens must be a multiple of {_LANES} for splash attention, got {length}"
        )
    shape = (length, length)
    mask: masks.Mask
    if not causal:
        mask = masks.FullMask(shape)
    elif window is None:
        mask = masks.CausalMask(shape)
    else:
        mask = masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    block = math.gcd(_SPLASH_BLOCK, length)
    sides = ["q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq"]
    sizes: dict[str, Any] = {f"block_{side}": block for side in sides}
    kernel = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(**sizes),
        interpret=_platform() != "tpu",
    )
    segments = None if segment_ids is None else kernels.SegmentIds(segment_ids, segment_ids)
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query * size**-0.5, key, value))  # the kernel does not scale
    y = jax.vmap(kernel, in_axes=(0, 0, 0, None if segments is None else 0))(query, key, value, segments)
    return jnp.swapaxes(y, 1, 2).astype(query.dtype)
