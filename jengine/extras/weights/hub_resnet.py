"""ResNet: a residual network with BatchNorm that classifies images."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jengine.extras.weights.huggingface import Depth, HubModel, Size, find_activation
from jengine.extras.weights.image_models import ClassifierSettings


@dataclasses.dataclass(kw_only=True)
class ResNetSettings(ClassifierSettings):
    """Settings of a `config.json`."""

    embedding_size: Size | None = 64
    hidden_sizes: Sequence[Size] | None = (256, 512, 1024, 2048)
    depths: Sequence[Depth] | None = (3, 4, 6, 3)
    layer_type: Literal["basic", "bottleneck"] | None = "bottleneck"
    hidden_act: str | None = "relu"
    downsample_in_first_stage: bool | None = False
    downsample_in_bottleneck: bool | None = False


def _make_arguments(settings: ResNetSettings) -> dict[str, Any]:
    return dict(
        num_classes=settings.count_classes(),
        widths=tuple(settings.hidden_sizes or ()),
        depths=tuple(settings.depths or ()),
        stem_width=settings.embedding_size,
        kind=settings.layer_type,
        stride_first=bool(settings.downsample_in_bottleneck),
        first_stride=2 if settings.downsample_in_first_stage else 1,
        activation=find_activation(str(settings.hidden_act)),
    )


_PREFIX = r"(?:resnet\.)?"  # ResNetModel has none
_BLOCK = rf"{_PREFIX}encoder\.stages\.(\d+)\.layers\.(\d+)\."
_RULES = [
    (rf"{old}\.{part}", f"{new}.{name}")
    for old, new in (
        (rf"{_PREFIX}embedder\.embedder", "stem"),
        (rf"{_BLOCK}layer\.(\d+)", r"stage\1_\2.conv\3"),
        (rf"{_BLOCK}shortcut", r"stage\1_\2.shortcut"),
    )
    for part, name in (("convolution", "conv"), ("normalization", "bn"))
]

resnet = HubModel(
    "ResNet",
    ResNetSettings,
    _make_arguments,
    [*_RULES, (r"classifier\.1", "head")],
    (r"stem\.conv\.kernel", r"stage0_0\.conv0\.conv\.kernel"),
)
