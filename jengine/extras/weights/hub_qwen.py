"""Qwen 2 and 3: a Llama with biases for queries, keys and values, or with norms for queries and
keys.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jengine.config.annotations import Index
from jengine.extras.weights.huggingface import Size
from jengine.extras.weights.language_models import (
    DecoderSettings,
    decoder,
    decoder_arguments,
    window_arguments,
)


@dataclasses.dataclass(kw_only=True)
class Qwen2Settings(DecoderSettings):
    """Settings of a Qwen 2 or 2.5."""

    num_key_value_heads: Size | None = 32
    max_position_embeddings: Size | None = 32_768
    use_sliding_window: bool | None = False
    sliding_window: Size | None = 4096
    max_window_layers: Index | None = 28  # the first block with a window
    layer_types: Sequence[str] | None = None


@dataclasses.dataclass(kw_only=True)
class Qwen3Settings(Qwen2Settings):
    """Settings of a Qwen 3."""

    head_dim: Size | None = 128
    attention_bias: bool | None = False


def _make_arguments(settings: Qwen2Settings) -> dict[str, Any]:
    first = settings.max_window_layers or 0
    usual = [i < first for i in range(settings.num_hidden_layers or 0)]
    window = settings.sliding_window if settings.use_sliding_window else None
    windows = window_arguments(settings.layer_types, usual, window)
    return dict(decoder_arguments(settings), **windows, bias="qkv")


def _qwen3_arguments(settings: Qwen3Settings) -> dict[str, Any]:
    bias = "attention" if settings.attention_bias else False
    return dict(_make_arguments(settings), query_key_norm=True, bias=bias)


qwen2 = decoder(Qwen2Settings, _make_arguments)
qwen3 = decoder(Qwen3Settings, _qwen3_arguments)
