"""ViT: a vision transformer that classifies images."""

import dataclasses
from typing import Any, Literal

from jengine.extras.weights.huggingface import HubModel, Size
from jengine.extras.weights.image_models import ClassifierSettings, EncoderSettings


@dataclasses.dataclass(kw_only=True)
class ViTSettings(ClassifierSettings, EncoderSettings):
    """Settings of a `config.json`."""

    patch_size: Size | None = 16
    qkv_bias: Literal[True] | None = True
    # The rest belongs to other heads, or to training.
    encoder_stride: Any = None
    pooler_act: Any = None
    pooler_output_size: Any = None
    hidden_dropout_prob: Any = None
    attention_probs_dropout_prob: Any = None


def _make_arguments(settings: ViTSettings) -> dict[str, Any]:
    own = dict(num_classes=settings.count_classes(), patch=settings.patch_size)
    return dict(settings.make_arguments(), **own)


_PREFIX = r"(?:vit\.)?"  # ViTModel has none
_BLOCK = rf"{_PREFIX}encoder\.layer\.(\d+)\."
_RULES = [
    (rf"{_PREFIX}embeddings\.cls_token", "cls_token"),
    (rf"{_PREFIX}embeddings\.position_embeddings", "pos_embed"),
    (rf"{_PREFIX}embeddings\.mask_token", None),
    (rf"{_PREFIX}embeddings\.patch_embeddings\.projection", "patch_embed"),
    (rf"{_BLOCK}attention\.attention\.(query|key|value)", r"layers_\1.attn.\2"),
    (rf"{_BLOCK}attention\.output\.dense", r"layers_\1.attn.out"),
    (rf"{_BLOCK}intermediate\.dense", r"layers_\1.fc1"),
    (rf"{_BLOCK}output\.dense", r"layers_\1.fc2"),
    (rf"{_BLOCK}layernorm_before", r"layers_\1.ln1"),
    (rf"{_BLOCK}layernorm_after", r"layers_\1.ln2"),
    (rf"{_PREFIX}layernorm", "norm"),
    (rf"{_PREFIX}pooler", None),
    ("classifier", "head"),
]
_LANDMARKS = ("cls_token", r"layers_0\.attn\.query\.kernel")

vit = HubModel("ViT", ViTSettings, _make_arguments, _RULES, _LANDMARKS)
