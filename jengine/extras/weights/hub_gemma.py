"""Gemma 1 and 2: a Llama with scaled embeddings, norms that multiply by 1 + scale, and GeGLU; the
second with a window in each other block, norms also after attentions and MLPs, and caps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jengine.config.annotations import Positive
from jengine.extras.weights.huggingface import Size, find_activation
from jengine.extras.weights.language_models import (
    DecoderSettings,
    decoder,
    decoder_arguments,
    window_arguments,
)


@dataclasses.dataclass(kw_only=True)
class GemmaSettings(DecoderSettings):
    """Settings of a Gemma 1."""

    head_dim: Size | None = 256
    tie_word_embeddings: bool | None = True
    hidden_act: str | None = "gelu_pytorch_tanh"
    hidden_activation: str | None = "gelu_pytorch_tanh"


@dataclasses.dataclass(kw_only=True)
class Gemma2Settings(GemmaSettings):
    """Settings of a Gemma 2."""

    sliding_window: Size | None = 4096
    layer_types: Sequence[str] | None = None
    sliding_window_pattern: Size | None = 2  # each second block attends to all earlier tokens
    query_pre_attn_scalar: Positive | None = 256
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0


def _gemma_arguments(settings: GemmaSettings, activation: str = "gelu_tanh") -> dict[str, Any]:
    # Files of Gemma 1 say 'gelu' for the approximation
    scale = float(settings.hidden_size or 1) ** 0.5
    own = dict(norm="rms_plus_one", activation=activation, embed_scale=scale)
    return dict(decoder_arguments(settings), **own)


def gemma2_arguments(settings: Gemma2Settings) -> dict[str, Any]:
    """Return the arguments of `TransformerLM` that Gemma 2 and 3 share."""
    every = settings.sliding_window_pattern or 1
    usual = [(i + 1) % every == 0 for i in range(settings.num_hidden_layers or 0)]
    return dict(
        _gemma_arguments(settings, find_activation(str(settings.hidden_activation))),
        **window_arguments(settings.layer_types, usual, settings.sliding_window),
        post_norm=True,
        attention_scale=(settings.query_pre_attn_scalar or 256) ** -0.5,
        attention_cap=settings.attn_logit_softcapping,
        logits_cap=settings.final_logit_softcapping,
    )


SANDWICH_NORMS = dict(
    input_layernorm="attn_norm",
    post_attention_layernorm="attn_post_norm",
    pre_feedforward_layernorm="mlp_norm",
    post_feedforward_layernorm="mlp_post_norm",
)

gemma = decoder(GemmaSettings, _gemma_arguments)
gemma2 = decoder(Gemma2Settings, gemma2_arguments, SANDWICH_NORMS)
