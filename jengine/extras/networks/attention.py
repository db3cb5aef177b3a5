"""Attention with the implementation that suits the device: splash attention, cuDNN, or query
blocks.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jengine.extras.networks.constrain import BATCH, CONTEXT
from jengine.extras.networks.logits import cap_values
from jengine.extras.networks.mesh_axes import axes_that_divide, get_platform
from jengine.model.constrain import axes_of_type

if TYPE_CHECKING:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
        SplashAttentionKernel,
    )

HEADS = "tensor"  # axis of the mesh over which heads are sharded
_Tree = TypeVar("_Tree")
Implementation = Literal["auto", "splash", "cudnn", "tokamax", "blocks", "plain"]

_logger = logging.getLogger(__name__)

_BLOCKS = 16  # at most so many blocks of queries: each is compiled
_MIN_QUERIES = 256
# rows and columns of a tile; larger ones do not fit into a v5e's memory of the core
_SPLASH_BLOCK = 512
_LANES = 128


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = True,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Attend from each token to tokens in the same sequence.

    On a mesh with the axis `context`, each device has the queries for some tokens, and gathers all
    keys and values.

    >>> x = jax.random.normal(jax.random.key(0), (2, 6, 4, 8))
    >>> attend(x, x[:, :, :2], x[:, :, :2]).shape
    (2, 6, 4, 8)

    Args:
      query: f[B, T, H, K].
      key, value: f[B, T, G, K]; each head serves H / G query heads.
      causal: whether a token attends to itself and earlier tokens only.
      segment_ids: int[B, T]; a token attends to tokens with its own number only, as in packed
        sequences.
      window: how many tokens a token attends to, itself included; None for all. Only with `causal`.
      scale: factor for the scores; None for `K**-0.5`.
      cap: bound for the scaled scores, `cap * tanh(score / cap)`; None for none. Only with
        `causal`, by 'splash', 'tokamax' and 'blocks'.
      implementation: 'splash' for the Pallas kernel for TPUs, 'cudnn' for the NVIDIA GPU kernel,
        'tokamax' for the kernels of this package, if it is installed; 'blocks' for query blocks,
        each with the keys that it attends to; 'plain' for all scores at once. 'auto' chooses
        'splash' and 'cudnn' where these accept the arguments, and 'blocks' otherwise.

    Returns:
      f[B, T, H, K], with `query`'s dtype.

    Raises:
      ValueError: shapes that do not fit, such as keys from another sequence, or an implementation
        that does not accept the arguments.

    Sources: Dao et al. 2022 (query and key blocks); Ainslie et al. 2023 (shared keys and values).
    """
    _check_arguments(query, key, value, causal, segment_ids, window, implementation)
    if implementation == "tokamax" and _count_shards(CONTEXT, query.shape[1]) > 1:
        raise ValueError("attend: `implementation` must not be 'tokamax' with the axis `context`")
    if cap is not None and (not causal or implementation in ("cudnn", "plain")):
        raise ValueError("attend: `cap` must be None without `causal`, with 'cudnn' and 'plain'")
    options: dict[str, Any] = dict(
        causal=causal, segment_ids=segment_ids, window=window, scale=scale
    )
    if implementation == "auto":
        implementation = choose_implementation(query, segment_ids)
        if implementation == "cudnn" and cap is not None:
            implementation = "blocks"
        elif implementation == "cudnn":
            try:
                return _attend_dense(query, key, value, implementation="cudnn", **options)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                # its version, the GPU, sizes
                _warn_without_cudnn(str(error))
                implementation = "blocks"
    if implementation == "splash":
        return _attend_splash(query, key, value, cap=cap, **options)
    if implementation == "cudnn":
        return _attend_dense(query, key, value, implementation="cudnn", **options)
    if implementation == "tokamax":
        attend_local = functools.partial(
            _attend_tokamax, causal=causal, window=window, scale=scale, cap=cap
        )
        return _on_each_device(attend_local, query, key, value, segment_ids)
    are_long = causal and query.shape[1] > _MIN_QUERIES
    if implementation == "blocks" and (are_long or cap is not None):
        if _count_shards(CONTEXT, query.shape[1]) > 1:
            attend_local = functools.partial(
                _attend_blocks_of_shard, window=window, scale=scale, cap=cap
            )
            return _on_each_device(attend_local, query, key, value, segment_ids)
        return _attend_blocks(query, key, value, segment_ids, segment_ids, window, scale, cap)
    return _attend_dense(query, key, value, implementation="xla", **options)


def _check_arguments(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    causal: bool,
    segment_ids: jax.Array | None,
    window: int | None,
    implementation: str,
) -> None:
    is_4d = query.ndim == key.ndim == 4 and key.shape == value.shape
    if not is_4d or query.shape != (*key.shape[:2], query.shape[2], key.shape[3]):
        raise ValueError(
            "attend: `query` must be f[B, T, H, K], `key` and `value` f[B, T, G, K], got "
            f"{', '.join(str(list(x.shape)) for x in (query, key, value))}"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"attend: heads must be a multiple of those of `key`, got {query.shape[2]} and "
            f"{key.shape[2]}"
        )
    if segment_ids is not None and segment_ids.shape != query.shape[:2]:
        found = f"{segment_ids.dtype}{list(segment_ids.shape)}"
        raise ValueError(f"attend: `segment_ids` must be int{list(query.shape[:2])}, got {found}")
    if window is not None and not causal:
        raise ValueError("attend: `window` must be None without `causal`, which it belongs to")
    if window is not None and window < 1:
        raise ValueError(f"attend: `window` must be at least 1, the token itself, got {window}")
    if implementation not in get_args(Implementation):
        known = ", ".join(get_args(Implementation))
        raise ValueError(f"attend: `implementation` must be one of {known}, got {implementation!r}")


def choose_implementation(query: jax.Array, segment_ids: jax.Array | None = None) -> Implementation:
    """Return the implementation for a query f[B, T, H, K] on the devices that the step is compiled
    for.

    Those are the mesh devices, which may differ in kind from this machine's, as in `jengine plan`.
    """
    platform = get_platform()
    shards = _count_shards(CONTEXT, query.shape[1])
    if platform == "tpu" and query.shape[1] % (shards * _LANES) == 0:
        return "splash"
    # cuDNN takes a mask of segments as a bias, with all scores in memory, so blocks are better
    # then.
    is_half = query.dtype in (jnp.bfloat16, jnp.float16)
    return (
        "cudnn"
        if platform in ("gpu", "cuda") and is_half and segment_ids is None and shards == 1
        else "blocks"
    )


@functools.cache  # once for each reason
def _warn_without_cudnn(reason: str) -> None:
    _logger.warning("attention is computed in blocks, slower than by cuDNN: %s", reason)


def _attend_dense(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    segment_ids: jax.Array | None,
    window: int | None,
    scale: float | None,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    mask = None if segment_ids is None else _same_segment(segment_ids, segment_ids)
    # JAX counts the neighbours on each side, a window the token itself too.
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        is_causal=causal,
        local_window_size=local,
        implementation=implementation,
    )


def _attend_tokamax(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
    cap: float | None,
) -> jax.Array:
    import tokamax

    y: jax.Array = tokamax.dot_product_attention(
        query,
        key,
        value,
        mask=None if segment_ids is None else _same_segment(segment_ids, segment_ids),
        scale=scale,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        logits_soft_cap=cap,
    )
    return y


def _attend_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    window: int | None,
    scale: float | None,
    cap: float | None,
    offset: jax.Array | None = None,
) -> jax.Array:
    """Compute the scores for one query block at a time, and again in the backward pass.

    The key slices are static, so later keys cost nothing: half the scores without a window. A loop
    with one slice size for all blocks would compute them all, as does a query `offset` that is not
    known here.
    """
    length = query.shape[1]
    count = key.shape[1]
    size = max(_MIN_QUERIES, -(-length // _BLOCKS))

    # Rematerialized: otherwise the backward pass would keep the scores of all blocks, which is the
    # memory that blocks save.
    @functools.partial(jax.checkpoint, static_argnums=(0, 1))
    def attend_block(
        queries: slice,
        keys: slice,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: tuple[jax.Array, jax.Array] | None,
        offset: jax.Array | int,
    ) -> jax.Array:
        positions = jnp.arange(queries.start, queries.stop)[:, None] + offset
        distance = positions - jnp.arange(keys.start, keys.stop)
        mask = (distance >= 0) & (distance < (count if window is None else window))
        mask = mask[None, None]
        if segments is not None:
            mask = mask & _same_segment(*segments)
        return attend_with_mask(query, key, value, mask, scale, cap)

    parts = []
    for start in range(0, length, size):
        queries = slice(start, min(start + size, length))
        # A causal block needs no later keys: leaving them out halves the products.
        keys = slice(0 if window is None else max(0, start - window + 1), queries.stop)
        # With an offset from the device the blocks' positions are traced, and slices must be known
        # to Python.
        keys = keys if offset is None else slice(0, count)
        segments = None
        if query_segments is not None and key_segments is not None:
            segments = query_segments[:, queries], key_segments[:, keys]
        shift = 0 if offset is None else offset
        arrays = query[:, queries], key[:, keys], value[:, keys]
        parts.append(attend_block(queries, keys, *arrays, segments, shift))
    return jnp.concatenate(parts, axis=1)


def _attend_blocks_of_shard(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    *,
    window: int | None,
    scale: float | None,
    cap: float | None,
) -> jax.Array:
    """Attend from this device's queries to the keys on all devices along `context`."""
    offset = jax.lax.axis_index(CONTEXT) * query.shape[1]
    key, value, segments = _gather((key, value, segment_ids))
    return _attend_blocks(query, key, value, segment_ids, segments, window, scale, cap, offset)


def attend_with_mask(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    scale: float | None,
    cap: float | None,
) -> jax.Array:
    """Attend from queries f[B, T, H, K] to keys f[B, S, G, K] where `mask`, bool[B or 1, 1, T, S],
    is True, with all scores at once; `scale` and `cap` as in `attend`.
    """
    if cap is None:
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, scale=scale, implementation="xla"
        )
    groups = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    scores = jnp.einsum("btghk,bsgk->bghts", groups, key, preferred_element_type=jnp.float32)
    scores = cap_values(scores * (query.shape[3] ** -0.5 if scale is None else scale), cap)
    weights = jax.nn.softmax(scores, where=mask[:, :, None]).astype(value.dtype)
    return jnp.einsum("bghts,bsgk->btghk", weights, value).reshape(query.shape)


def _same_segment(queries: jax.Array, keys: jax.Array) -> jax.Array:
    return (queries[:, :, None] == keys[:, None, :])[:, None]


def _on_each_device(
    attend_local: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    kernel: "SplashAttentionKernel | None" = None,
) -> jax.Array:
    """Map over the batch, the heads and `context`.

    A splash attention kernel is divided along `context` too.
    """
    arguments = (
        (query, key, value, segment_ids)
        if kernel is None
        else (query, key, value, segment_ids, kernel)
    )
    mesh = jax.sharding.get_abstract_mesh()
    mapped_axes = axes_of_type(mesh, AxisType.Auto)
    if not mapped_axes:
        return attend_local(*arguments)
    batch = axes_that_divide(mesh, BATCH, query.shape[0])
    context = axes_that_divide(mesh, (CONTEXT,), query.shape[1])
    heads = axes_that_divide(mesh, (HEADS,), key.shape[2])
    arrays = P(batch, context, heads)
    segments = None if segment_ids is None else P(batch, context)
    specs: tuple[Any, ...] = (arrays, arrays, arrays, segments)
    if kernel is not None:
        # Without a mask the kernel is the same for all.
        parts = () if kernel.fwd_mask_info.q_sequence is None else context
        specs = (*specs, kernel.manual_sharding_spec(NamedSharding(mesh, P(None, parts))))
    mapped = jax.shard_map(
        attend_local,
        in_specs=specs,
        out_specs=arrays,
        axis_names=mapped_axes,  # the others too: Mosaic refuses to divide a kernel
        check_vma=False,  # the kernel's results have no type of varying axes
    )
    return mapped(*arguments)


def _count_shards(axis: str, size: int) -> int:
    """Return how many parts a mesh axis divides `size` into."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in axes_that_divide(mesh, (axis,), size))


def _gather(tree: _Tree) -> _Tree:
    """Gather the tokens, axis 1, from all devices along `context`.

    The backward pass scatters their gradients.
    """
    return jax.tree.map(lambda x: jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True), tree)


def _attend_splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    segment_ids: jax.Array | None,
    window: int | None,
    scale: float | None,
    cap: float | None,
) -> jax.Array:
    """Run the Pallas kernel on each device: XLA cannot divide a kernel, so batch, tokens and
    heads are mapped here.
    """
    length = query.shape[1]
    shards = _count_shards(CONTEXT, length)
    if length % (shards * _LANES):
        raise ValueError(
            f"attend: the number of tokens must be a multiple of {shards * _LANES} for splash "
            f"attention, got {length}"
        )
    heads = query.shape[2] // _count_shards(HEADS, key.shape[2])
    # With a window all devices have as much to do as their neighbours.
    is_balanced = shards > 1 and causal and window is None
    kernel = _make_splash(length, heads, shards, causal, window, is_balanced, cap)
    if scale is None:
        query = query * query.shape[-1] ** -0.5  # the kernel does not scale
    elif scale != 1:
        query = query * scale
    attend_local = functools.partial(_attend_splash_local, shards=shards, is_balanced=is_balanced)
    return _on_each_device(attend_local, query, key, value, segment_ids, kernel)


def _attend_splash_local(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    kernel: "SplashAttentionKernel",
    *,
    shards: int,
    is_balanced: bool,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    dtype = query.dtype
    segments = None if segment_ids is None else kernels.SegmentIds(segment_ids, segment_ids)
    if shards > 1:
        key, value = _gather((key, value))
        segments = segments and segments._replace(kv=_gather(segments.kv))
    if is_balanced:
        query = _exchange_halves(query, shards)
        segments = segments and segments._replace(q=_exchange_halves(segments.q, shards))
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    outputs = jax.vmap(kernel, in_axes=(0, 0, 0, None if segments is None else 0))(
        query, key, value, segments
    )
    y = jnp.swapaxes(jnp.asarray(outputs), 1, 2).astype(dtype)
    return _exchange_halves(y, shards, back=True) if is_balanced else y


def _make_splash(
    length: int,
    heads: int,
    shards: int,
    causal: bool,
    window: int | None,
    is_balanced: bool,
    cap: float | None,
) -> "SplashAttentionKernel":
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    mask: masks.FullMask | masks.CausalMask | masks.LocalMask
    if not causal:
        mask = masks.FullMask((length // shards, length))  # JAX cannot divide it
    elif window is None:
        mask = masks.CausalMask(shape)
    else:
        mask = masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    if is_balanced and isinstance(mask, masks.CausalMask):
        halves = np.arange(length, dtype=np.int32).reshape(shards, 2, -1)
        order = np.empty_like(halves)
        for k in range(2):
            order[_owners(k, shards), k] = halves[:, k]
        mask.q_sequence = order.reshape(-1)
    query_block = math.gcd(_SPLASH_BLOCK, length // shards)
    key_block = math.gcd(_SPLASH_BLOCK, length)
    sides = ["q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq"]
    sizes: dict[str, Any] = {
        f"block_{side}": query_block if side[0] == "q" else key_block for side in sides
    }
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(**sizes),
        attn_logits_soft_cap=cap,
        head_shards=1,
        q_seq_shards=shards if causal else 1,
        interpret=get_platform() != "tpu",
    )


def _exchange_halves(x: jax.Array, shards: int, back: bool = False) -> jax.Array:
    """Give device i along `context` the i-th half shard and the i-th from the end, so that work is
    equal.

    Late tokens attend to many keys and early ones to few; without this the last device has almost
    twice the average.
    """
    halves = []
    for k, half in enumerate(jnp.split(x, 2, axis=1)):
        pairs = list(enumerate(_owners(k, shards)))
        halves.append(
            jax.lax.ppermute(half, CONTEXT, [pair[::-1] for pair in pairs] if back else pairs)
        )
    return jnp.concatenate(halves, axis=1)


def _owners(k: int, shards: int) -> list[int]:
    """Return the device that gets half `k`, 0 or 1, for each shard."""
    return [min(2 * i + k, 2 * (shards - i) - 1 - k) for i in range(shards)]
