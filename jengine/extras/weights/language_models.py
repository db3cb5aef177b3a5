"""What the language models of Hugging Face share: settings of a decoder, its rotations, the names
of its weights, and the `config.json` for a `TransformerLM`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jengine.config.annotations import Positive, Range, is_host_number
from jengine.config.errors import ConfigError
from jengine.extras.networks.transformer import TransformerLM
from jengine.extras.weights.array_rules import RuleLike
from jengine.extras.weights.huggingface import (
    ACTIVATIONS,
    CONFIG,
    TRANSFORMER,
    Depth,
    HubModel,
    Shapes,
    Size,
    find_activation,
    find_differences,
    is_neutral,
    require_family,
)

# The settings of a `rope_type`; what is not here would be ignored, so it is refused.
_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate", _ORIGINAL),
}
LINEAR = {"transform": "transpose"}  # PyTorch's Linear stores (out, in)
HEAD: RuleLike = ("lm_head", "head", LINEAR)
_PREFIX = r"(?:model\.)?"  # LlamaModel has no prefix, LlamaForCausalLM has one
_BLOCK = rf"{_PREFIX}layers\.(\d+)\."
_DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}


@dataclasses.dataclass(kw_only=True)
class DecoderSettings:
    """Settings that Llama has, and those that are derived from it."""

    vocab_size: Size | None
    hidden_size: Size | None
    num_hidden_layers: Depth | None
    num_attention_heads: Size | None
    intermediate_size: Size | None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Positive | None = 1e-6
    hidden_act: str | None = "silu"
    tie_word_embeddings: bool | None = False
    max_position_embeddings: Size | None = 2048
    original_max_position_embeddings: Size | None = None
    rope_theta: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None


def language_model(
    settings: type,
    make_arguments: Callable[[Any], dict[str, Any]],
    rules: Sequence[RuleLike],
    list_tensors: Callable[[Mapping[str, Any]], Shapes] | None = None,
) -> HubModel:
    """Return a family whose network is `TransformerLM`; see `HubModel`."""
    landmarks = (r"embed\.embedding", r"layers(_0)?\.attn\.query\.kernel")
    return HubModel(
        TRANSFORMER, settings, make_arguments, rules, landmarks, _describe, list_tensors
    )


def decoder(
    settings: type[DecoderSettings],
    make_arguments: Callable[[Any], dict[str, Any]],
    norms: Mapping[str, str] = NORMS,
) -> HubModel:
    """Return a family that is derived from Llama.

    Args:
      settings, make_arguments: see `HubModel`.
      norms: names of the norms in a block, here by name there.
    """
    return language_model(
        settings,
        make_arguments,
        decoder_rules(norms),
        lambda arguments: _decoder_tensors(arguments, norms),
    )


def _describe(module: TransformerLM) -> dict[str, Any]:
    own = {"embed_scale": module.embed_scale, "logits_cap": module.logits_cap}
    return {**vars(module.make_settings()), **own}


def decoder_arguments(settings: DecoderSettings) -> dict[str, Any]:
    """Return the arguments of `TransformerLM` for the settings that all have."""
    # Before version 5 of transformers, the base and the scaling stood apart.
    rope = settings.rope_scaling or settings.rope_parameters or {}
    width = settings.hidden_size
    heads = settings.num_attention_heads
    head_size = settings.head_dim
    if head_size is None and width is not None and heads is not None:
        head_size = width // heads
    return dict(
        vocab_size=settings.vocab_size,
        width=width,
        depth=settings.num_hidden_layers,
        heads=heads,
        kv_heads=settings.num_key_value_heads or heads,
        head_size=head_size,
        mlp_width=settings.intermediate_size,
        rotary_base=find_base(rope, settings.rope_theta, 10_000.0),
        rotary_scaling=find_scaling(rope, settings),
        norm_epsilon=settings.rms_norm_eps,
        activation=find_activation(str(settings.hidden_act)),
        tied=settings.tie_word_embeddings,
    )


def find_base(rope: Mapping[str, Any], given: float | None, usual: float) -> float:
    """Return the base of rotations from `rope_parameters`, or what older files have beside them."""
    for base in (rope.get("rope_theta"), given):
        if base is None:
            continue
        if not is_host_number(base) or base not in Range(gt=1, le=1e300):
            raise ConfigError(
                f"`rope_theta` of a {CONFIG} must be a number above 1, got {base!r:.100}"
            )
        return float(base)
    return usual


def find_scaling(rope: Mapping[str, Any], settings: DecoderSettings) -> dict[str, Any] | None:
    """Return `TransformerLM.rotary_scaling` for `rope_parameters`, or the `rope_scaling` of older
    files.
    """
    # As in transformers, a length beside the rotations takes precedence, and the longest context is
    # the last resort.
    longest = settings.max_position_embeddings or type(settings).max_position_embeddings or 0
    original = settings.original_max_position_embeddings or rope.get(_ORIGINAL) or longest
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in tuple(_ROPE_KEYS):
        raise ConfigError(
            f"`rope_type` of a {CONFIG} must be 'default', 'linear', 'llama3' or 'yarn', got "
            f"{kind!r:.100}"
        )
    known = ("rope_type", "type", "rope_theta", *_ROPE_KEYS[kind])
    unknown = [
        name for name, value in rope.items() if name not in known and not is_neutral(name, value)
    ]
    if unknown:
        raise ConfigError(
            f"the `rope_type` {kind!r} of a {CONFIG} must have no other settings, got {unknown}"
        )
    if kind == "default":
        return None
    scaling = {
        name: value
        for name in _ROPE_KEYS[kind]
        if (value := rope.get(name)) is not None and name != _ORIGINAL
    }
    if kind == "yarn":
        scaling.setdefault("factor", longest / original)
    return {"kind": kind, **scaling, **({} if kind == "linear" else {"original_length": original})}


def window_arguments(
    layers: Sequence[str] | None, usual: Sequence[bool], window: int | None
) -> dict[str, Any]:
    """Return the arguments of `TransformerLM` for blocks of which some attend to a window.

    Args:
      layers: `layer_types`, 'full_attention' or 'sliding_attention' for each block; None for the
        usual ones.
      usual: whether a block attends to all earlier tokens, in files without `layer_types`.
      window: `sliding_window` in tokens.
    """
    is_full = list(usual)
    if layers is not None:
        kinds = ("sliding_attention", "full_attention")
        if len(layers) != len(is_full) or not set(layers) <= {*kinds}:
            raise ConfigError(
                f"`layer_types` of a {CONFIG} must have {len(is_full)} entries, each one of "
                f"{kinds}, got {layers!r:.100}"
            )
        is_full = [kind == "full_attention" for kind in layers]
    if window is None or all(is_full):
        return dict(window=None)
    return dict(window=window, full_blocks=tuple(i for i, full in enumerate(is_full) if full))


def decoder_rules(norms: Mapping[str, str] = NORMS) -> list[RuleLike]:
    """Return the rules for names as Llama's; `norms` as in `decoder`."""
    projections = dict(q_proj="query", k_proj="key", v_proj="value", o_proj="out")
    head_norms = dict(q_norm="query_norm", k_norm="key_norm")
    return [
        (rf"{_BLOCK}self_attn\.rotary_emb", None),  # the frequencies, in files of older versions
        *(
            (rf"{_BLOCK}self_attn\.{old}", rf"layers_\1.attn.{new}", LINEAR)
            for old, new in projections.items()
        ),
        *(
            (rf"{_BLOCK}self_attn\.{old}", rf"layers_\1.attn.{new}")
            for old, new in head_norms.items()
        ),
        *(
            (rf"{_BLOCK}mlp\.{name}_proj", rf"layers_\1.mlp.{name}", LINEAR)
            for name in ("gate", "up", "down")
        ),
        *((rf"{_BLOCK}{old}", rf"layers_\1.{new}") for old, new in norms.items()),
        (rf"{_PREFIX}embed_tokens", "embed"),
        (rf"{_PREFIX}norm", "norm"),
        HEAD,
    ]


def _decoder_tensors(arguments: Mapping[str, Any], norms: Mapping[str, str]) -> Shapes:
    width = arguments["width"]
    mlp = arguments["mlp_width"]
    settings = TransformerLM(**arguments).make_settings()
    queries = settings.heads * settings.head_size
    keys = settings.kv_heads * settings.head_size
    shapes: Shapes = {}

    def add(name: str, *shape: int, biased: bool = False) -> None:
        shapes[f"{name}.weight"] = shape
        if biased:  # as many as there are outputs
            shapes[f"{name}.bias"] = shape[:1]

    add("model.embed_tokens", arguments["vocab_size"], width)
    for i in range(arguments["depth"]):
        block = f"model.layers.{i}."
        for name, size in zip("qkv", (queries, keys, keys), strict=True):
            add(f"{block}self_attn.{name}_proj", size, width, biased=settings.attention_bias)
        add(f"{block}self_attn.o_proj", width, queries, biased=settings.out_bias)
        if settings.query_key_norm:
            add(f"{block}self_attn.q_norm", settings.head_size)
            add(f"{block}self_attn.k_norm", settings.head_size)
        add(f"{block}mlp.gate_proj", mlp, width, biased=settings.mlp_bias)
        add(f"{block}mlp.up_proj", mlp, width, biased=settings.mlp_bias)
        add(f"{block}mlp.down_proj", width, mlp, biased=settings.mlp_bias)
        for norm in norms:
            add(f"{block}{norm}", width)
    add("model.norm", width)
    if not arguments["tied"]:
        add("lm_head", arguments["vocab_size"], width)
    return shapes


def make_config(module: TransformerLM) -> dict[str, Any]:
    """Return the `config.json` for a `TransformerLM`: what `transformer_arguments` reads.

    >>> config = make_config(TransformerLM(vocab_size=9, width=8, heads=2, kv_heads=1))
    >>> config["model_type"], config["num_key_value_heads"]
    ('llama', 1)

    Raises:
      ConfigError: settings that no known model type has together.
    """
    is_learned = module.positions == "learned"
    known = _gpt2_settings(module) if is_learned else _decoder_settings(module)
    found = {}
    for model_type in ("gpt2",) if is_learned else _DECODERS:
        names = {field.name for field in dataclasses.fields(require_family(model_type).settings)}
        name = "GPT2LMHead" if is_learned else model_type.partition("_")[0].capitalize()
        config: dict[str, Any] = {
            "model_type": model_type,
            "architectures": [f"{name}Model" if is_learned else f"{name}ForCausalLM"],
            # The defaults are tokens of other vocabularies
            "bos_token_id": None,
            "eos_token_id": None,
            **{key: value for key, value in known.items() if key in names},
        }
        if not (differences := find_differences(config, module)):
            return config
        found[model_type] = "; ".join(differences)
    closest = "gpt2" if is_learned else "llama" if module.window is None else "mistral"
    shown = found[closest].replace("that of the weights", f"that of {closest}")
    raise ConfigError(
        f"a TransformerLM must have the settings of one of gpt2, {', '.join(_DECODERS)} to be "
        f"written as such, got those of none: {shown}"
    )


def _gpt2_settings(module: TransformerLM) -> dict[str, Any]:
    settings = module.make_settings()
    return {
        "vocab_size": module.vocab_size,
        "tie_word_embeddings": module.tied,
        "n_embd": module.width,
        "n_layer": module.depth,
        "n_head": settings.heads,
        "n_inner": settings.mlp_width,
        "n_positions": module.max_length,
        "layer_norm_epsilon": settings.norm_epsilon,
        "activation_function": _name_activation(module),
    }


def _decoder_settings(module: TransformerLM) -> dict[str, Any]:
    """Return the settings that one or the other family has."""
    settings = module.make_settings()
    is_full = [module.window is None or i in settings.full_blocks for i in range(module.depth)]
    config: dict[str, Any] = {
        "vocab_size": module.vocab_size,
        "tie_word_embeddings": module.tied,
        "hidden_size": module.width,
        "num_hidden_layers": module.depth,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_size,
        "intermediate_size": settings.mlp_width,
        "rms_norm_eps": settings.norm_epsilon,
        "hidden_act": _name_activation(module),
        "hidden_activation": _name_activation(module),
        "rope_theta": settings.rotary_base,
        "attention_bias": settings.attention_bias,
        "mlp_bias": settings.mlp_bias,
        "sliding_window": settings.window,
        "use_sliding_window": settings.window is not None,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_full],
        "query_pre_attn_scalar": round(settings.attention_scale**-2),
        "attn_logit_softcapping": settings.attention_cap,
        "final_logit_softcapping": module.logits_cap,
        "rope_local_base_freq": settings.local_rotary_base,
    }
    if (scaling := module.rotary_scaling) is not None:
        names = {"kind": "rope_type", "original_length": _ORIGINAL}
        config["rope_scaling"] = {names.get(name, name): scaling[name] for name in scaling}
        if "original_length" in scaling:
            longest = float(scaling["original_length"]) * float(scaling["factor"])
            config["max_position_embeddings"] = int(longest)
    return config


def _name_activation(module: TransformerLM) -> str:
    return {here: there for there, here in ACTIVATIONS.items() if there != "swish"}[
        module.activation
    ]
