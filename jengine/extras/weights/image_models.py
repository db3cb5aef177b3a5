"""What the image models of Hugging Face share: settings of a classifier, and of a transformer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jengine.config.annotations import Positive
from jengine.extras.weights.huggingface import ACTIVATIONS, Depth, Size, find_activation


@dataclasses.dataclass(kw_only=True)
class ImageSettings:
    """Settings of images, which say themselves how many channels and pixels they have."""

    num_channels: Any = None
    image_size: Any = None


@dataclasses.dataclass(kw_only=True)
class ClassifierSettings(ImageSettings):
    """Settings that all classifiers have."""

    id2label: Mapping[str, Any] | None = None
    num_labels: Size | None = None
    # of networks that return the features of several stages
    out_features: Any = None
    out_indices: Any = None
    stage_names: Any = None

    def count_classes(self) -> int:
        """Return the number of classes, which files with two leave out."""
        return len(self.id2label) if self.id2label else self.num_labels or 2


@dataclasses.dataclass(kw_only=True)
class EncoderSettings:
    """Settings of a vision transformer, and of the text encoder beside one."""

    hidden_size: Size | None = 768
    intermediate_size: Size | None = 3072
    num_hidden_layers: Depth | None = 12
    num_attention_heads: Size | None = 12
    hidden_act: str | None = "gelu"
    layer_norm_eps: Positive | None = 1e-12

    def make_arguments(self) -> dict[str, Any]:
        """Return the arguments of `ViT` or `TextTransformer`."""
        return dict(
            width=self.hidden_size,
            depth=self.num_hidden_layers,
            heads=self.num_attention_heads,
            mlp_ratio=(self.intermediate_size or 0) / (self.hidden_size or 1),
            activation=find_activation(
                str(self.hidden_act), {**ACTIVATIONS, "quick_gelu": "quick_gelu"}
            ),
            norm_epsilon=self.layer_norm_eps,
        )
