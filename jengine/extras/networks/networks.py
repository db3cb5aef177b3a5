"""Two small Linen image classifiers for examples and tests."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine.config.annotations import Count, Decay
from jengine.config.registry import MODELS


@MODELS.register_module()
class SmallCNN(nn.Module):
    """Convolutional classifier: stages with two convolutions and BatchNorm.

    Each but the first halves the resolution.

    >>> logits, variables = SmallCNN(widths=(4,)).init_with_output(
    ...     jax.random.key(0), jnp.zeros((2, 8, 8, 1))
    ... )
    >>> logits.shape
    (2, 10)

    Attributes:
      num_classes: number of classes.
      widths: channels per stage.
      dropout: dropout rate before the classifier.
    """

    num_classes: Count = 10
    widths: tuple[Count, ...] = (32, 64)
    dropout: Decay = 0.0

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """Return logits f[B, num_classes] for images f[B, H, W, C]."""
        x = image
        for stage, width in enumerate(self.widths):
            for depth in range(2):
                stride = 2 if stage > 0 and depth == 0 else 1
                # BatchNorm subtracts the mean, and a bias with it.
                x = nn.Conv(
                    width, (3, 3), (stride, stride), use_bias=False, name=f"conv{stage}_{depth}"
                )(x)
                # Flax's default of 0.99 forgets the initial statistics only after hundreds of
                # steps.
                x = nn.BatchNorm(
                    use_running_average=not train, momentum=0.9, name=f"bn{stage}_{depth}"
                )(x)
                x = nn.relu(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x.mean(axis=(1, 2)))
        return nn.Dense(self.num_classes, name="head")(x)


class ViTBlock(nn.Module):
    """Pre-norm transformer block.

    Attributes:
      heads: number of attention heads.
      mlp_ratio: hidden MLP width divided by the token width.
      dropout: dropout rate after attention and MLP.
    """

    heads: Count
    mlp_ratio: Count
    dropout: Decay

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return tokens f[B, N, D] for tokens `x` f[B, N, D]."""
        y = nn.LayerNorm(name="ln1")(x)
        y = nn.MultiHeadDotProductAttention(self.heads, name="attn")(y)
        x = x + nn.Dropout(self.dropout, deterministic=not train)(y)
        y = nn.LayerNorm(name="ln2")(x)
        y = nn.Dense(self.mlp_ratio * x.shape[-1], name="fc1")(y)
        y = nn.Dense(x.shape[-1], name="fc2")(nn.gelu(y))
        return x + nn.Dropout(self.dropout, deterministic=not train)(y)


@MODELS.register_module()
class SmallViT(nn.Module):
    """Vision transformer with a class token and learned position embeddings.

    Attributes:
      num_classes: number of classes.
      patch: side length of a patch in pixels.
      width: token width.
      depth: number of blocks.
      heads: attention heads per block.
      mlp_ratio: hidden MLP width divided by `width`.
      dropout: dropout rate in the blocks.
    """

    num_classes: Count = 10
    patch: Count = 2
    width: Count = 64
    depth: Count = 4
    heads: Count = 4
    mlp_ratio: Count = 2
    dropout: Decay = 0.0

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """Return logits f[B, num_classes] for images f[B, H, W, C]."""
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, size, name="patch_embed")(image)
        x = x.reshape(x.shape[0], -1, self.width)
        cls_token = self.param("cls_token", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate(
            [jnp.broadcast_to(cls_token, (x.shape[0], 1, self.width)).astype(x.dtype), x], axis=1
        )
        # Learned, as attention alone does not see the order of patches.
        x = x + self.param("pos_embed", nn.initializers.normal(0.02), (1, x.shape[1], self.width))
        for i in range(self.depth):
            x = ViTBlock(self.heads, self.mlp_ratio, self.dropout, name=f"layers_{i}")(x, train)
        return nn.Dense(self.num_classes, name="head")(nn.LayerNorm(name="norm")(x[:, 0]))
