"""Residual networks as Linen modules."""

from collections.abc import Sequence
from typing import Literal

import jax
from flax import linen as nn

from jengine.config.annotations import Count
from jengine.config.registry import MODELS
from jengine.extras.networks.activations import ACTIVATIONS, Activation


class ConvNorm(nn.Module):
    """Convolution and BatchNorm.

    Attributes:
      width: output channels.
      window: side length of the kernel.
      stride: step in each direction.
    """

    width: Count
    window: Count
    stride: Count = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return features f[B, H / stride, W / stride, width] for `x` f[B, H, W, C]."""
        # As in PyTorch, both sides are padded alike. A bias would be subtracted with the mean.
        pad = self.window // 2
        size = (self.window, self.window)
        x = nn.Conv(self.width, size, self.stride, padding=pad, use_bias=False, name="conv")(x)
        # Flax's default of 0.99 forgets the initial statistics only after hundreds of steps.
        return nn.BatchNorm(use_running_average=not train, momentum=0.9, name="bn")(x)


class ResNetBlock(nn.Module):
    """Two or three convolutions, added to their input.

    Attributes:
      width: output channels.
      stride: step in each direction.
      kind: 'basic' for two 3 x 3 convolutions; 'bottleneck' for three, of which the second is 3 x 3
        and has a quarter of the channels.
      stride_first: whether the first convolution of a bottleneck has the stride, not the second.
      activation: nonlinearity.
    """

    width: Count
    stride: Count
    kind: Literal["basic", "bottleneck"]
    stride_first: bool
    activation: Activation

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return features f[B, H / stride, W / stride, width] for `x` f[B, H, W, C]."""
        convolutions = [(self.width, 3, self.stride), (self.width, 3, 1)]
        if self.kind == "bottleneck":
            inner = self.width // 4
            strides = (self.stride, 1) if self.stride_first else (1, self.stride)
            convolutions = [(inner, 1, strides[0]), (inner, 3, strides[1]), (self.width, 1, 1)]
        activate = ACTIVATIONS[self.activation]
        y = x
        for i, convolution in enumerate(convolutions):
            y = ConvNorm(*convolution, name=f"conv{i}")(y if i == 0 else activate(y), train)
        if x.shape[-1] != self.width or self.stride > 1:
            x = ConvNorm(self.width, 1, self.stride, name="shortcut")(x, train)
        return activate(x + y)


@MODELS.register_module()
class ResNet(nn.Module):
    """Residual network, a convolutional classifier with BatchNorm.

    The defaults are ResNet-50; `kind="basic", widths=(64, 128, 256, 512), depths=(2, 2, 2, 2)` is
    ResNet-18. `jengine.extras.weights.hub_module` reads the arguments from a Hugging Face
    `config.json`.

    >>> logits, _ = ResNet(widths=(8,), depths=(1,)).init_with_output(
    ...     jax.random.key(0), jax.numpy.zeros((1, 8, 8, 3))
    ... )
    >>> logits.shape
    (1, 1000)

    Attributes:
      num_classes: number of classes; None to return features f[B, C].
      widths: channels per stage; each but the first halves the resolution.
      depths: blocks per stage.
      stem_width: channels of the first convolution, 7 x 7, which with a max pooling makes a
        position of 4 x 4 pixels.
      kind: 'basic' or 'bottleneck' blocks, see `ResNetBlock`.
      stride_first: whether the first convolution of a bottleneck has the stride, not the second.
      first_stride: stride of the first stage.
      activation: nonlinearity.

    Source: He et al. 2016.
    """

    num_classes: Count | None = 1000
    widths: Sequence[Count] = (256, 512, 1024, 2048)
    depths: Sequence[Count] = (3, 4, 6, 3)
    stem_width: Count = 64
    kind: Literal["basic", "bottleneck"] = "bottleneck"
    stride_first: bool = False
    first_stride: Count = 1
    activation: Activation = "relu"

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """Return logits f[B, num_classes], or features, for images f[B, H, W, C]."""
        x = ConvNorm(self.stem_width, 7, 2, name="stem")(image, train)
        x = ACTIVATIONS[self.activation](x)
        x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            for i in range(depth):
                stride = 1 if i > 0 else self.first_stride if stage == 0 else 2
                block = width, stride, self.kind, self.stride_first, self.activation
                x = ResNetBlock(*block, name=f"stage{stage}_{i}")(x, train)
        x = x.mean(axis=(1, 2))
        return x if self.num_classes is None else nn.Dense(self.num_classes, name="head")(x)
