"""Two small Linen image classifiers for examples and tests."""

from typing import Literal

import jax
from flax import linen as nn

from jengine.config.annotations import Count, Decay, Positive
from jengine.config.registry import MODELS
from jengine.extras.networks.activations import Activation
from jengine.extras.networks.vision_transformer import ViT


@MODELS.register_module()
class SmallCNN(nn.Module):
    """Convolutional classifier: stages with two convolutions and BatchNorm.

    Each but the first halves the resolution.

    >>> logits, variables = SmallCNN(widths=(4,)).init_with_output(
    ...     jax.random.key(0), jax.numpy.zeros((2, 8, 8, 1))
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


@MODELS.register_module()
class SmallViT(ViT):
    """Small `ViT` for examples and tests.

    Attributes: see `ViT`.
    """

    num_classes: Count | None = 10
    patch: Count = 2
    width: Count = 64
    depth: Count = 4
    heads: Count = 4
    mlp_ratio: Positive = 2
    activation: Activation | Literal["quick_gelu"] = "gelu_tanh"
    norm_epsilon: Positive = 1e-6
