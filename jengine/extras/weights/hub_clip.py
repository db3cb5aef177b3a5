"""CLIP: encoders for images and for texts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jengine.config.annotations import Index
from jengine.extras.weights.array_rules import RuleLike
from jengine.extras.weights.huggingface import HubModel, Size, parse_settings
from jengine.extras.weights.image_models import EncoderSettings, ImageSettings


@dataclasses.dataclass(kw_only=True)
class ClipSettings:
    """Settings of a `config.json`; in old files `text_config_dict` counts, not `text_config`."""

    text_config: Mapping[str, Any] | None = None
    text_config_dict: Mapping[str, Any] | None = None
    vision_config: Mapping[str, Any] | None = None
    vision_config_dict: Mapping[str, Any] | None = None
    projection_dim: Size | None = 512
    logit_scale_init_value: Any = None  # the weights have the value


@dataclasses.dataclass(kw_only=True)
class _Text(EncoderSettings):
    vocab_size: Size | None = 49_408
    hidden_size: Size | None = 512
    intermediate_size: Size | None = 2048
    num_attention_heads: Size | None = 8
    max_position_embeddings: Size | None = 77
    eos_token_id: Index | None = 49_407
    projection_dim: Any = None  # only that beside the parts counts


@dataclasses.dataclass(kw_only=True)
class _Image(ImageSettings, EncoderSettings):
    patch_size: Size | None = 32
    projection_dim: Any = None


def _make_arguments(settings: ClipSettings) -> dict[str, Any]:
    def read(kind: type, *parts: Mapping[str, Any] | None) -> Any:
        given = next((x for x in parts if x is not None), {})
        usual = dict(hidden_act="quick_gelu", layer_norm_eps=1e-5)
        return parse_settings({**usual, **given}, kind, "CLIP")

    text = read(_Text, settings.text_config_dict, settings.text_config)
    image = read(_Image, settings.vision_config_dict, settings.vision_config)
    # 2 is wrong in early files: the end is the token with the largest number
    end = None if text.eos_token_id == 2 else text.eos_token_id
    words = dict(vocab_size=text.vocab_size, max_length=text.max_position_embeddings)
    patches = dict(patch=image.patch_size, patch_bias=False, pre_norm=True)
    return dict(
        image={**image.make_arguments(), **patches},
        text={**text.make_arguments(), **words, "end_token": end},
        width=settings.projection_dim,
    )


_NAMES = {
    r"embeddings\.position_embedding\.weight": "pos_embed",
    r"embeddings\.token_embedding": "embed",
    r"embeddings\.class_embedding": "cls_token",
    r"embeddings\.patch_embedding": "patch_embed",
    r"encoder\.layers\.(\d+)\.self_attn": r"layers_\1.attn",  # with PyTorch's names
    r"encoder\.layers\.(\d+)\.layer_norm(\d)": r"layers_\1.ln\2",
    r"encoder\.layers\.(\d+)\.mlp": r"layers_\1",
    "pre_layrnorm": "pre_norm",
    "(?:post_layernorm|final_layer_norm)": "norm",
}
_RULES: list[RuleLike] = [
    (r"(?:text|vision)_model\.embeddings\.position_ids", None),  # in older files
    *((rf"text_model\.{old}", f"text_encoder.{new}") for old, new in _NAMES.items()),
    *((rf"vision_model\.{old}", f"image_encoder.{new}") for old, new in _NAMES.items()),
    ("visual_projection", "image_projection"),
    ("logit_scale", "log_factor"),
]
_MARKS = (r"text_encoder\.embed\.embedding",)
clip = HubModel("CLIP", ClipSettings, _make_arguments, _RULES, _MARKS, lambda x: x.make_settings())
