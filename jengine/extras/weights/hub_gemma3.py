"""Gemma 3 without images: a Gemma 2 with normed queries and keys, and with other rotations in
blocks that have a window.
"""

import dataclasses
from typing import Any

from jengine.config.annotations import Positive
from jengine.config.errors import ConfigError
from jengine.extras.weights.hub_gemma import SANDWICH_NORMS, Gemma2Settings, gemma2_arguments
from jengine.extras.weights.huggingface import CONFIG, Size
from jengine.extras.weights.language_models import decoder, find_base


@dataclasses.dataclass(kw_only=True)
class Gemma3Settings(Gemma2Settings):
    """Settings of a Gemma 3 without images."""

    sliding_window_pattern: Size | None = 6
    _sliding_window_pattern: Any = None  # beside `layer_types`
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    rope_local_base_freq: float | None = None


def _make_arguments(settings: Gemma3Settings) -> dict[str, Any]:
    rope = dict(settings.rope_parameters or {})
    local = rope.pop("sliding_attention", {})
    usual = {"rope_theta": settings.rope_theta or 1e6}
    full = {**usual, **rope.pop("full_attention", {}), **(settings.rope_scaling or {})}
    if rope or local.get("rope_type", "default") != "default":
        raise ConfigError(
            f"`rope_parameters` of a {CONFIG} must have 'full_attention', and 'sliding_attention' "
            f"with the `rope_type` 'default', got {settings.rope_parameters!r:.200}"
        )
    settings = dataclasses.replace(settings, rope_parameters=full, rope_scaling=None)
    base = find_base(local, settings.rope_local_base_freq, 10_000.0)
    return dict(gemma2_arguments(settings), local_rotary_base=base, query_key_norm=True)


gemma3_text = decoder(Gemma3Settings, _make_arguments, SANDWICH_NORMS)
