"""GPT-2: layer norms, learned positions, tied embeddings; its `Conv1D` stores (in, out)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jengine.config.annotations import Positive
from jengine.extras.weights.huggingface import Depth, Shapes, Size, find_activation
from jengine.extras.weights.language_models import HEAD, language_model


@dataclasses.dataclass(kw_only=True)
class Gpt2Settings:
    """Settings of a `config.json`."""

    vocab_size: Size | None
    n_embd: Size | None
    n_layer: Depth | None
    n_head: Size | None
    n_positions: Size | None
    n_inner: Size | None = None
    layer_norm_epsilon: Positive | None = 1e-5
    activation_function: str | None = "gelu_new"
    tie_word_embeddings: bool | None = True


def _make_arguments(settings: Gpt2Settings) -> dict[str, Any]:
    width = settings.n_embd
    return dict(
        vocab_size=settings.vocab_size,
        width=width,
        depth=settings.n_layer,
        heads=settings.n_head,
        mlp_width=settings.n_inner or 4 * (width or 0),  # null in the configs of the Hub
        positions="learned",
        max_length=settings.n_positions,
        norm="layer",
        norm_epsilon=settings.layer_norm_epsilon,
        mlp="plain",
        activation=find_activation(str(settings.activation_function)),
        bias=True,
        tied=settings.tie_word_embeddings,
    )


_PREFIX = r"(?:transformer\.)?"  # GPT2Model has none
_BLOCK = rf"{_PREFIX}h\.(\d+)\."
_CONV1D = {"transform": "none"}
_FUSED = [rf"layers_\1.attn.{name}" for name in ("query", "key", "value")]
_RULES = [
    (rf"{_BLOCK}attn\.(?:bias|masked_bias)", None),  # the causal mask, in files of older versions
    (rf"{_BLOCK}attn\.c_attn", _FUSED, {"split": -1, **_CONV1D}),
    (rf"{_BLOCK}attn\.c_proj", r"layers_\1.attn.out", _CONV1D),
    (rf"{_BLOCK}mlp\.c_fc", r"layers_\1.mlp.up", _CONV1D),
    (rf"{_BLOCK}mlp\.c_proj", r"layers_\1.mlp.down", _CONV1D),
    (rf"{_BLOCK}ln_1", r"layers_\1.attn_norm"),
    (rf"{_BLOCK}ln_2", r"layers_\1.mlp_norm"),
    (rf"{_PREFIX}wte", "embed"),
    (rf"{_PREFIX}wpe", "positions"),
    (rf"{_PREFIX}ln_f", "norm"),
    HEAD,
]


def _list_tensors(arguments: Mapping[str, Any]) -> Shapes:
    width, mlp, vocab = (arguments[name] for name in ("width", "mlp_width", "vocab_size"))
    block: dict[str, tuple[int, ...]] = {"ln_1": (width,), "ln_2": (width,)}
    block |= {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    block |= {"mlp.c_fc": (width, mlp), "mlp.c_proj": (mlp, width)}
    biased = {f"h.{i}.{name}": block[name] for i in range(arguments["depth"]) for name in block}
    shapes = {f"transformer.{name}.weight": x for name, x in {**biased, "ln_f": (width,)}.items()}
    shapes |= {name.replace(".weight", ".bias"): shape[-1:] for name, shape in shapes.items()}
    head = {} if arguments["tied"] else {"lm_head.weight": (vocab, width)}
    embeddings = {"wte": (vocab, width), "wpe": (arguments["max_length"], width)}
    return shapes | {f"transformer.{name}.weight": x for name, x in embeddings.items()} | head


gpt2 = language_model(Gpt2Settings, _make_arguments, _RULES, _list_tensors)
