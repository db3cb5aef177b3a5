"""Llama and Mistral: RMS norms, rotary positions, shared keys, gated MLP."""

import dataclasses
from typing import Any

from jengine.extras.weights.huggingface import Size
from jengine.extras.weights.language_models import DecoderSettings, decoder, decoder_arguments


@dataclasses.dataclass(kw_only=True)
class LlamaSettings(DecoderSettings):
    """Settings of a Llama."""

    attention_bias: bool | None = False
    mlp_bias: bool | None = False


@dataclasses.dataclass(kw_only=True)
class MistralSettings(DecoderSettings):
    """Settings of a Mistral."""

    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size | None = 131_072
    sliding_window: Size | None = 4096


def _llama_arguments(settings: LlamaSettings) -> dict[str, Any]:
    attention = bool(settings.attention_bias)
    mlp = bool(settings.mlp_bias)
    bias = attention if attention == mlp else "attention" if attention else "mlp"
    return dict(decoder_arguments(settings), bias=bias)


def _mistral_arguments(settings: MistralSettings) -> dict[str, Any]:
    return dict(decoder_arguments(settings), window=settings.sliding_window)


llama = decoder(LlamaSettings, _llama_arguments)
mistral = decoder(MistralSettings, _mistral_arguments)
