"""ConvNeXt as a Linen module."""

from collections.abc import Sequence

import jax
import numpy as np
from flax import linen as nn

from jengine.config.annotations import Count, Decay, NonNegative, Positive
from jengine.config.registry import MODELS
from jengine.extras.networks.activations import ACTIVATIONS, Activation

_EPSILON = 1e-6  # of the norms before the last one


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution and MLP, added with a factor for each channel.

    Attributes:
      layer_scale: initial factor; 0 for none.
      drop_path: how often the block is skipped in training.
      activation: nonlinearity in the MLP.
    """

    layer_scale: NonNegative
    drop_path: Decay
    activation: Activation

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return features f[B, H, W, C] for features `x` f[B, H, W, C]."""
        width = x.shape[-1]
        y = nn.Conv(width, (7, 7), feature_group_count=width, name="depthwise")(x)
        y = nn.LayerNorm(_EPSILON, name="norm")(y)
        y = ACTIVATIONS[self.activation](nn.Dense(4 * width, name="fc1")(y))
        y = nn.Dense(width, name="fc2")(y)
        if self.layer_scale:
            factor = nn.initializers.constant(self.layer_scale)
            y = y * self.param("layer_scale", factor, (width,)).astype(y.dtype)
        # the same for all features of an example
        return x + nn.Dropout(self.drop_path, (1, 2, 3), deterministic=not train)(y)


@MODELS.register_module()
class ConvNeXt(nn.Module):
    """Convolutional classifier with the design of a vision transformer.

    The defaults are ConvNeXt-T. `jengine.extras.weights.hub_module` reads the arguments from a
    Hugging Face `config.json`.

    >>> logits, _ = ConvNeXt(widths=(4, 8), depths=(1, 1)).init_with_output(
    ...     jax.random.key(0), jax.numpy.zeros((1, 8, 8, 3))
    ... )
    >>> logits.shape
    (1, 1000)

    Attributes:
      num_classes: number of classes; None to return features f[B, C].
      widths: channels per stage; each but the first halves the resolution.
      depths: blocks per stage.
      patch: side length in pixels that the first convolution makes a position of.
      layer_scale: initial factor of the blocks; 0 for none.
      drop_path: how often the last block is skipped in training; earlier ones less, in proportion.
      activation: nonlinearity in the MLPs; 'gelu_tanh' is the approximate GELU.
      norm_epsilon: number added to the variance in the last norm.

    Source: Liu et al. 2022.
    """

    num_classes: Count | None = 1000
    widths: Sequence[Count] = (96, 192, 384, 768)
    depths: Sequence[Count] = (3, 3, 9, 3)
    patch: Count = 4
    layer_scale: NonNegative = 1e-6
    drop_path: Decay = 0.0
    activation: Activation = "gelu"
    norm_epsilon: Positive = 1e-12

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """Return logits f[B, num_classes], or features, for images f[B, H, W, C]."""
        size = (self.patch, self.patch)
        x = nn.Conv(self.widths[0], size, size, padding="VALID", name="stem")(image)
        x = nn.LayerNorm(_EPSILON, name="stem_norm")(x)
        rates = iter(np.linspace(0.0, self.drop_path, sum(self.depths)).tolist())
        for stage, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            if stage > 0:
                x = nn.LayerNorm(_EPSILON, name=f"downsample{stage}_norm")(x)
                conv = nn.Conv(width, (2, 2), (2, 2), padding="VALID", name=f"downsample{stage}")
                x = conv(x)
            for i in range(depth):
                block = self.layer_scale, next(rates), self.activation
                x = ConvNeXtBlock(*block, name=f"stage{stage}_{i}")(x, train)
        x = nn.LayerNorm(self.norm_epsilon, name="norm")(x.mean(axis=(1, 2)))
        return x if self.num_classes is None else nn.Dense(self.num_classes, name="head")(x)
