"""ConvNeXt: a convolutional network that classifies images."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jengine.config.annotations import NonNegative, Positive
from jengine.extras.weights.huggingface import Depth, HubModel, Size, find_activation
from jengine.extras.weights.image_models import ClassifierSettings


@dataclasses.dataclass(kw_only=True)
class ConvNextSettings(ClassifierSettings):
    """Settings of a `config.json`."""

    hidden_sizes: Sequence[Size] | None = (96, 192, 384, 768)
    depths: Sequence[Depth] | None = (3, 3, 9, 3)
    patch_size: Size | None = 4
    hidden_act: str | None = "gelu"
    layer_norm_eps: Positive | None = 1e-12
    layer_scale_init_value: NonNegative | None = 1e-6
    num_stages: Any = None  # as many as there are sizes
    drop_path_rate: Any = None  # in training


def _make_arguments(settings: ConvNextSettings) -> dict[str, Any]:
    return dict(
        num_classes=settings.count_classes(),
        widths=tuple(settings.hidden_sizes or ()),
        depths=tuple(settings.depths or ()),
        patch=settings.patch_size,
        layer_scale=settings.layer_scale_init_value or 0.0,
        activation=find_activation(str(settings.hidden_act)),
        norm_epsilon=settings.layer_norm_eps,
    )


_PREFIX = r"(?:convnext\.)?"  # ConvNextModel has none
_STAGE = rf"{_PREFIX}encoder\.stages\.(\d+)\."
_BLOCK = rf"{_STAGE}layers\.(\d+)\."
_RULES = [
    (rf"{_PREFIX}embeddings\.patch_embeddings", "stem"),
    (rf"{_PREFIX}embeddings\.layernorm", "stem_norm"),
    (rf"{_STAGE}downsampling_layer\.0", r"downsample\1_norm"),
    (rf"{_STAGE}downsampling_layer\.1", r"downsample\1"),
    (rf"{_BLOCK}dwconv", r"stage\1_\2.depthwise"),
    (rf"{_BLOCK}layernorm", r"stage\1_\2.norm"),
    (rf"{_BLOCK}pwconv(\d)", r"stage\1_\2.fc\3"),
    (rf"{_BLOCK}layer_scale_parameter", r"stage\1_\2.layer_scale"),
    (rf"{_PREFIX}layernorm", "norm"),
    ("classifier", "head"),
]

convnext = HubModel(
    "ConvNeXt",
    ConvNextSettings,
    _make_arguments,
    _RULES,
    (r"stem\.kernel", r"stage0_0\.depthwise\.kernel"),
)
