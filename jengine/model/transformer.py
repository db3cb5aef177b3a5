"""Decoder-only transformer for language modelling, as a Linen module."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine.annotations import Count
from jengine.model.constrain import constrain
from jengine.registry import MODELS

BATCH = ("data", "fsdp")  # axes of the mesh over which examples are sharded
QUERIES = 256  # number of queries whose scores are held at a time
ROTARY_BASE = 10_000.0  # ratio of the longest to the shortest wavelength of the rotary position embedding


class CausalAttention(nn.Module):
    """Attention to earlier positions, with rotary position embeddings and `heads` heads."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return tokens f[B, T, D] for tokens `x` f[B, T, D]."""
        width = x.shape[-1]
        shape = (self.heads, width // self.heads)
        query, key, value = (nn.DenseGeneral(shape, use_bias=False, name=n)(x) for n in ("query", "key", "value"))
        y = attend(rotate(query), rotate(key), value)
        return nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, name="out")(y)


class GatedMLP(nn.Module):
    """MLP with a gate and the width `hidden`: `down(silu(gate(x)) * up(x))`."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return tokens f[B, T, D] for tokens `x` f[B, T, D]."""
        gate, up = (nn.Dense(self.hidden, use_bias=False, name=name)(x) for name in ("gate", "up"))
        return nn.Dense(x.shape[-1], use_bias=False, name="down")(nn.silu(gate) * up)


class DecoderBlock(nn.Module):
    """Pre-norm transformer block with the form that `nn.scan` requires."""

    heads: int
    mlp_width: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Return tokens f[B, T, D] for tokens `x` f[B, T, D], and None, a layer's output."""
        x = constrain(x, BATCH)
        x = x + CausalAttention(self.heads, name="attn")(nn.RMSNorm(name="attn_norm")(x))
        x = x + GatedMLP(self.mlp_width, name="mlp")(nn.RMSNorm(name="mlp_norm")(x))
        return x, None


@MODELS.register_module()
class TransformerLM(nn.Module):
    """Decoder-only transformer, which predicts the next token.

    The blocks are one `nn.scan` over parameters that are stacked along a leading axis, [depth, ...], so the compile
    time does not grow with the depth. On a mesh, tokens stay sharded by examples: without that constraint XLA may shard
    them like the parameters, and exchange tokens instead of parameters.

    >>> model = TransformerLM(vocab_size=32, width=8, heads=2, mlp_width=16)
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), jnp.zeros((1, 4), int))[0].shape
    (1, 4, 32)

    Attributes:
      vocab_size: number of different tokens.
      width: token width.
      depth: number of blocks.
      heads: attention heads per block, each with an even width.
      mlp_width: hidden MLP width.
      remat: whether the backward pass computes each block again instead of keeping intermediate results, which takes
        about a third more computation; only block inputs are kept.

    Sources: Vaswani et al. 2017 (transformer); Zhang and Sennrich 2019 (RMSNorm); Shazeer 2020 (gated MLP); Su et al.
    2021 (rotary position embedding).
    """

    vocab_size: Count
    width: Count = 64
    depth: Count = 2
    heads: Count = 4
    mlp_width: Count = 192
    remat: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return logits f[B, T, vocab_size] for the token after each in `tokens` int[B, T].

        Raises:
          ValueError: `width` is not a multiple of twice `heads`.
        """
        if self.width % (2 * self.heads):
            raise ValueError(
                f"TransformerLM: `width` must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}"
            )
        embed = nn.Embed(self.vocab_size, self.width, embedding_init=nn.initializers.normal(0.02), name="embed")
        x = constrain(embed.embedding)[tokens]  # gather the table: lookups in a shard exchange all tokens instead
        # The loop of the scan already prevents XLA from merging the repeated computation with the first one.
        block = nn.remat(DecoderBlock, prevent_cse=False) if self.remat else DecoderBlock
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
        x, _ = layers(self.heads, self.mlp_width, name="layers")(constrain(x, BATCH), None)
        x = nn.RMSNorm(name="norm")(constrain(x, BATCH))
        return constrain(nn.Dense(self.vocab_size, use_bias=False, name="head")(x), BATCH, None, "tensor")


def attend(query: jax.Array, key: jax.Array, value: jax.Array, queries: int = QUERIES) -> jax.Array:
    """Return the causal attention, f[B, T, H, K], for query, key and value f[B, T, H, K].

    The memory for the scores, f32[B, H, queries, T], grows linearly with T: they are computed for `queries` queries at
    a time, and again in the backward pass. If `queries` does not divide T, all queries are one part.
    """
    length = query.shape[1]
    if length % queries:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    @jax.checkpoint
    def attend_part(start: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(query, start, queries, axis=1)
        mask = start + jnp.arange(queries)[:, None] >= jnp.arange(length)
        return jax.nn.dot_product_attention(part, key, value, mask=mask[None, None])

    parts = jax.lax.map(attend_part, jnp.arange(0, length, queries))
    return jnp.moveaxis(parts, 0, 1).reshape(query.shape)


def rotate(x: jax.Array) -> jax.Array:
    """Return queries or keys, f[B, T, H, K], rotated by angles proportional to the positions.

    Channel i in the first half and channel i in the second half are the two coordinates of a plane. The result has the
    dtype of `x`; angles are computed in float32.
    """
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
