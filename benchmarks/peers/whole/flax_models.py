"""Define the three networks in Flax, for the script by hand."""

import jax.numpy as jnp
from flax import linen as nn


class CNN(nn.Module):
    """Two stages of two convolutions with BatchNorm."""

    @nn.compact
    def __call__(self, x, train):
        """Return logits f[B, 10]."""
        for stage, width in enumerate((32, 64)):
            for depth in range(2):
                stride = 2 if stage > 0 and depth == 0 else 1
                x = nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(10)(x)


class Block(nn.Module):
    """Pre-norm transformer block."""

    hidden: int
    causal: bool

    @nn.compact
    def __call__(self, x):
        """Return tokens f[B, N, 64]."""
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2])) if self.causal else None
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
        y = nn.gelu(nn.Dense(self.hidden)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class ViT(nn.Module):
    """Four blocks over patches of 2 x 2 pixels and a class token."""

    @nn.compact
    def __call__(self, x, train):
        """Return logits f[B, 10]."""
        x = nn.Conv(64, (2, 2), (2, 2))(x).reshape(x.shape[0], -1, 64)
        token = self.param("cls_token", nn.initializers.zeros, (1, 1, 64))
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, 64)), x], 1)
        x = x + self.param("pos_embed", nn.initializers.normal(0.02), (1, x.shape[1], 64))
        for _ in range(4):
            x = Block(128, causal=False)(x)
        return nn.Dense(10)(nn.LayerNorm()(x[:, 0]))


class Text(nn.Module):
    """Two causal blocks over 64 bytes with learned positions."""

    @nn.compact
    def __call__(self, x, train):
        """Return logits f[B, 64, 256]."""
        x = nn.Embed(256, 64, name="embed")(x)
        x = x + self.param("pos_embed", nn.initializers.normal(0.02), (1, 64, 64))
        for _ in range(2):
            x = Block(192, causal=True)(x)
        return nn.Dense(256, use_bias=False)(nn.LayerNorm()(x))


NETWORKS = {"cnn": CNN, "vit": ViT, "text": Text}
