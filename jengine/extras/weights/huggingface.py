"""Language models of Hugging Face: their config, the names of their weights, and the rules for
`TransformerLM`.

A directory of the Hub has `config.json`, whose `model_type` names the layout, and safetensors
files.

| `model_type` | model |
|---|---|
| `gpt2` | layer norms, learned positions, tied embeddings; `Conv1D` stored (in, out) |
| `llama`, `mistral` | RMS norms, rotary positions, shared keys, gated MLP; stored (out, in) |
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from jengine.config.annotations import Positive, Range, check_values, is_host_number
from jengine.config.errors import ConfigError
from jengine.config.json_codec import decode_object
from jengine.config.storage import read_bytes
from jengine.extras.networks.transformer import TransformerLM
from jengine.extras.weights.array_rules import RuleLike
from jengine.model.linen import LinenModel
from jengine.model.model import ModelWrapper

Config = Mapping[str, Any]  # the content of a `config.json`
Shapes = dict[str, tuple[int, ...]]

CONFIG = "config.json"
MODEL_TYPES = ("gpt2", "llama", "mistral")
# Hugging Face's `gelu` is the exact one; `gelu_new` and `gelu_pytorch_tanh` are one approximation
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
# The settings of a `rope_type`; what is not here would be ignored, so it is refused.
_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate", _ORIGINAL),
}
# Settings that change no number here: names, tokens, dropout, initial values, memory, outputs, and
# what old files store for generation. All others are read, or refused: a multiplier or a cap would
# be left out in silence.
_HARMLESS_KEYS = """
    _attn_implementation _commit_hash _name_or_path architectures attention_dropout
    attn_implementation attn_pdrop bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    embd_pdrop encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label
    initializer_range label2id length_penalty max_length max_position_embeddings min_length
    model_max_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id
    padding_side prefix pretraining_tp problem_type remove_invalid_values reorder_and_upcast_attn
    repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache
"""
_HARMLESS = frozenset(_HARMLESS_KEYS.split())
_HARMLESS_PREFIXES = ("summary_",)  # of a head for classes
# These are only known to change nothing with one value.
_NEUTRAL = {
    "add_cross_attention": False,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "logits_scaling": 1.0,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "residual_multiplier": 1.0,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_encoder_decoder": False,
    "use_sliding_window": False,
}
_GPT2_KEYS = (
    "vocab_size",
    "n_embd",
    "n_layer",
    "n_head",
    "n_inner",
    "n_positions",
    "layer_norm_epsilon",
    "activation_function",
    "tie_word_embeddings",
)
_LLAMA_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    _ORIGINAL,
)
_KEYS: dict[str, tuple[str, ...]] = {
    "gpt2": _GPT2_KEYS,
    "llama": (*_LLAMA_KEYS, "attention_bias", "mlp_bias"),
    "mistral": (*_LLAMA_KEYS, "sliding_window"),
}
_Size = Annotated[int, Range(ge=1, lt=2**31)]  # of an axis
_Depth = Annotated[int, Range(ge=1, le=10_000)]
_QUERY_KEY_VALUE = ("query", "key", "value")


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the config in a directory; {} if there is none.

    Raises:
      ValueError: see `read_settings`.
    """
    return read_settings(Path(directory) / CONFIG)


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings in a JSON file; {} if there is no such file.

    Raises:
      ValueError: it is no JSON object.
    """
    try:
        return decode_object(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} must have settings in JSON: {error}") from error


def require_config(config: Config | str | os.PathLike[str]) -> Config:
    """Return a config that is given as such or as the path of its directory.

    FileNotFoundError if there is none.
    """
    if not isinstance(config, str | os.PathLike):
        return config
    if found := read_config(config):
        return found
    raise FileNotFoundError(f"there is no {CONFIG} in {config}")


def transformer_arguments(config: Config | str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments of `TransformerLM` for a language model of Hugging Face.

    Args:
      config: its `config.json`, read or as the path of its directory.

    Raises:
      ConfigError: another model type, or a setting that `TransformerLM` does not have.

    >>> config = dict(model_type="gpt2", vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=5)
    >>> arguments = transformer_arguments(config)
    >>> arguments["mlp_width"], arguments["norm"], arguments["max_length"]
    (32, 'layer', 5)
    """
    config = require_config(config)
    model_type = str(config.get("model_type"))
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"`model_type` of a {CONFIG} must be one of {MODEL_TYPES}, got {model_type!r:.100}"
        )
    _check_types(config)
    _check_known(config, model_type)
    # Two families cover the three types: Mistral differs from Llama by settings alone.
    try:
        arguments = _gpt2_arguments(config) if model_type == "gpt2" else _llama_arguments(config)
        # sizes that must divide each other, and the scaling
        TransformerLM(**arguments).make_settings()
    except KeyError as error:
        raise ConfigError(
            f"{error.args[0]!r} of a {CONFIG} must be given for the model type {model_type!r}"
        ) from None
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a {CONFIG} must describe a model: {error}") from None
    return arguments


@dataclasses.dataclass
class _Types:
    """Types of the settings that are read; null stands for the default."""

    vocab_size: _Size | None = None
    n_embd: _Size | None = None
    n_layer: _Depth | None = None
    n_head: _Size | None = None
    n_positions: _Size | None = None
    n_inner: _Size | None = None
    layer_norm_epsilon: Positive | None = None
    activation_function: str | None = None
    hidden_size: _Size | None = None
    num_hidden_layers: _Depth | None = None
    num_attention_heads: _Size | None = None
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    intermediate_size: _Size | None = None
    sliding_window: _Size | None = None
    max_position_embeddings: _Size | None = None
    original_max_position_embeddings: _Size | None = None
    rope_theta: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None
    rms_norm_eps: Positive | None = None
    hidden_act: str | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None


def _check_types(config: Config) -> None:
    """Raise ConfigError for a setting of another type or out of range.

    The file may be from anyone.
    """
    known = {field.name for field in dataclasses.fields(_Types)}
    try:
        check_values(
            CONFIG, _Types, {name: value for name, value in config.items() if name in known}
        )
    except TypeError as error:
        raise ConfigError(str(error)) from None
    for settings in (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {}):
        base = settings.get("rope_theta")
        if base is not None and (not is_host_number(base) or base not in Range(gt=1, le=1e300)):
            raise ConfigError(
                f"`rope_theta` of a {CONFIG} must be a number above 1, got {base!r:.100}"
            )


def _gpt2_arguments(config: Config) -> dict[str, Any]:
    return dict(
        vocab_size=config["vocab_size"],
        width=config["n_embd"],
        depth=config["n_layer"],
        heads=config["n_head"],
        mlp_width=config.get("n_inner") or 4 * config["n_embd"],  # null in the configs of the Hub
        positions="learned",
        max_length=config["n_positions"],
        norm="layer",
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        mlp="plain",
        activation=_find_activation(config.get("activation_function", "gelu_new")),
        bias=True,
        tied=config.get("tie_word_embeddings", True),
    )


def _llama_arguments(config: Config) -> dict[str, Any]:
    is_mistral = config["model_type"] == "mistral"
    attention_bias = bool(config.get("attention_bias"))
    mlp_bias = bool(config.get("mlp_bias"))
    # Before version 5 of transformers, the base and the scaling stood apart.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # As in transformers, a length beside the rotations takes precedence, and the longest context is
    # the last resort.
    longest = config.get("max_position_embeddings") or (131_072 if is_mistral else 2048)
    original = config.get(_ORIGINAL) or rope.get(_ORIGINAL) or longest
    return dict(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        depth=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        # Absent from the first Llama; what is absent has the value of the type, what is null that
        # of the heads.
        kv_heads=config.get("num_key_value_heads", 8 if is_mistral else None)
        or config["num_attention_heads"],
        head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        mlp_width=config["intermediate_size"],
        window=config.get("sliding_window", 4096) if is_mistral else None,
        rotary_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        rotary_scaling=_find_scaling(rope, original, longest),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        activation=_find_activation(config.get("hidden_act", "silu")),
        bias=attention_bias
        if attention_bias == mlp_bias
        else ("attention" if attention_bias else "mlp"),
        tied=config.get("tie_word_embeddings", False),
    )


def _find_scaling(rope: Mapping[str, Any], original: int, longest: int) -> dict[str, Any] | None:
    """Return `TransformerLM.rotary_scaling` for `rope_parameters`, or the `rope_scaling` of older
    files.

    Args:
      rope: the settings.
      original: the context in tokens before it was scaled.
      longest: the context afterwards.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in tuple(_ROPE_KEYS):
        raise ConfigError(
            f"`rope_type` of a {CONFIG} must be 'default', 'linear', 'llama3' or 'yarn', got "
            f"{kind!r:.100}"
        )
    known = ("rope_type", "type", "rope_theta", *_ROPE_KEYS[kind])
    unknown = [
        name for name, value in rope.items() if name not in known and not _is_neutral(name, value)
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


def _check_known(config: Config, model_type: str) -> None:
    for name, value in config.items():
        if name in _KEYS[model_type] or name in _HARMLESS or name.startswith(_HARMLESS_PREFIXES):
            continue
        if not _is_neutral(name, value):
            expected = (
                f"{_NEUTRAL[name]} for TransformerLM"
                if name in _NEUTRAL
                else "a setting of TransformerLM"
            )
            raise ConfigError(f"`{name}` of a {CONFIG} must be {expected}, got {value!r:.80}")


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a setting that `TransformerLM` does not have changes nothing."""
    return value is None or value in ({}, []) or (name in _NEUTRAL and value == _NEUTRAL[name])


def _find_activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"the activation of a {CONFIG} must be one of {sorted(_ACTIVATIONS)}, got {name!r}"
        )
    return _ACTIVATIONS[name]


def make_config(module: TransformerLM) -> dict[str, Any]:
    """Return the `config.json` for a `TransformerLM`: what `transformer_arguments` reads.

    >>> config = make_config(TransformerLM(vocab_size=9, width=8, heads=2, kv_heads=1))
    >>> config["model_type"], config["num_key_value_heads"]
    ('llama', 1)

    Raises:
      ConfigError: settings that no known model type has together.
    """
    settings = module.make_settings()
    activations = {value: name for name, value in _ACTIVATIONS.items() if name != "swish"}
    activation = activations[settings.activation]
    config: dict[str, Any] = {
        "vocab_size": module.vocab_size,
        "tie_word_embeddings": module.tied,
        # The defaults are tokens of other vocabularies
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if module.positions == "learned":
        config |= {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": module.width,
            "n_layer": module.depth,
            "n_head": settings.heads,
            "n_inner": settings.mlp_width,
            "n_positions": module.max_length,
            "layer_norm_epsilon": settings.norm_epsilon,
            "activation_function": activation,
        }
    else:
        is_llama = settings.window is None
        config |= {
            "model_type": "llama" if is_llama else "mistral",
            "architectures": ["LlamaForCausalLM" if is_llama else "MistralForCausalLM"],
            "hidden_size": module.width,
            "num_hidden_layers": module.depth,
            "num_attention_heads": settings.heads,
            "num_key_value_heads": settings.kv_heads,
            "head_dim": settings.head_size,
            "intermediate_size": settings.mlp_width,
            "rms_norm_eps": settings.norm_epsilon,
            "hidden_act": activation,
            "rope_theta": settings.rotary_base,
        }
        if (scaling := module.rotary_scaling) is not None:
            names = {"kind": "rope_type", "original_length": _ORIGINAL}
            config["rope_scaling"] = {names.get(name, name): scaling[name] for name in scaling}
            if "original_length" in scaling:
                longest = float(scaling["original_length"]) * float(scaling["factor"])
                config["max_position_embeddings"] = int(longest)
        config |= (
            {"attention_bias": settings.attention_bias, "mlp_bias": settings.mlp_bias}
            if is_llama
            else {"sliding_window": settings.window}
        )
    if differences := find_differences(config, module):
        raise ConfigError(
            f"a TransformerLM must have the settings of one of {MODEL_TYPES} to be written as "
            f"such, got those of none: {'; '.join(differences)}".replace(
                "that of the weights", f"that of {config['model_type']}"
            )
        )
    return config


def find_differences(config: Config, model: object) -> list[str]:
    """Return the settings of a `TransformerLM` that differ from those of the weights, though all
    shapes may fit.

    >>> config = dict(model_type="gpt2", vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=5)
    >>> find_differences(
    ...     config, TransformerLM(**{**transformer_arguments(config), "activation": "gelu"})
    ... )
    ["activation is 'gelu', that of the weights is 'gelu_tanh'"]
    """
    while isinstance(model, ModelWrapper):  # such as LoRA
        model = model.model
    module = model.module if isinstance(model, LinenModel) else model
    if config.get("model_type") not in MODEL_TYPES or not isinstance(module, TransformerLM):
        return []
    expected, actual = (
        vars(x.make_settings()) for x in (TransformerLM(**transformer_arguments(config)), module)
    )
    return [
        f"{name} is {actual[name]!r}, that of the weights is {value!r}"
        for name, value in expected.items()
        if actual[name] != value
    ]


def choose_rules(
    config: Config, stored: Iterable[str], target: Iterable[str]
) -> Sequence[RuleLike]:
    """Return the rules of a config's model type for the parameters of `TransformerLM`, scanned or
    not; none for other parameters.
    """
    names = set(target)
    is_transformer = "embed.embedding" in names and any(
        f"{layer}.attn.query.kernel" in names for layer in ("layers", "layers_0")
    )
    if config.get("model_type") not in MODEL_TYPES or not is_transformer:
        return ()
    return make_rules(config["model_type"], stored, names, config)


def make_rules(
    model_type: str, stored: Iterable[str], target: Iterable[str], config: Config | None = None
) -> list[RuleLike]:
    """Return the rules of `rename` for the weights of a language model.

    Args:
      model_type: one of `MODEL_TYPES`.
      stored: the names of the weights; rules for others are left out.
      target: the parameter paths of a `TransformerLM`.
      config: the `config.json` next to the weights; None or {} without one.

    >>> make_rules("llama", ["model.norm.weight"], ["norm.scale"])
    [('(?:model\\\\.)?norm', 'norm')]
    """
    stored = list(stored)
    target = set(target)
    is_scanned = any(path.startswith("layers.") for path in target)
    has_head = "head.kernel" in target
    layer, stack = ("layers", {"stack": 0}) if is_scanned else (r"layers_\1", {})
    # A tied file has one array for an untied model. Weights without an output layer, such as those
    # of LlamaModel, are others: their embedding is no output layer.
    is_tied = (config or {}).get("tie_word_embeddings", model_type == "gpt2" or not config)
    copies = has_head and is_tied and not any(name.startswith("lm_head") for name in stored)
    embed: str | list[str] = ["embed", "head"] if copies else "embed"
    head: list[RuleLike] = [
        ("lm_head", "head", {"transform": "transpose"}) if has_head else ("lm_head", None)
    ]
    make = _gpt2_rules if model_type == "gpt2" else _llama_rules
    rules = [*make(layer, stack, embed), *head]
    # A rule that matches nothing is an error, and files differ in what they leave out
    return [
        rule for rule in rules if any(re.match(rf"(?:{rule[0]})(?=\.|$)", name) for name in stored)
    ]


def _gpt2_rules(layer: str, stack: Mapping[str, int], embed: str | list[str]) -> list[RuleLike]:
    # GPT2Model has no prefix, GPT2LMHeadModel has one.
    # `Conv1D` stores (in, out), as Flax's kernels
    prefix = r"(?:transformer\.)?"
    conv1d = {"transform": "none", **stack}
    block = rf"{prefix}h\.(\d+)\."
    return [
        # the causal mask, in files of older versions
        (rf"{block}attn\.(?:bias|masked_bias)", None),
        (
            rf"{block}attn\.c_attn",
            [f"{layer}.attn.{name}" for name in _QUERY_KEY_VALUE],
            {"split": -1, **conv1d},
        ),
        (rf"{block}attn\.c_proj", f"{layer}.attn.out", conv1d),
        (rf"{block}mlp\.c_fc", f"{layer}.mlp.up", conv1d),
        (rf"{block}mlp\.c_proj", f"{layer}.mlp.down", conv1d),
        (rf"{block}ln_1", f"{layer}.attn_norm", stack),
        (rf"{block}ln_2", f"{layer}.mlp_norm", stack),
        (rf"{prefix}wte", embed),
        (rf"{prefix}wpe", "positions"),
        (rf"{prefix}ln_f", "norm"),
    ]


def _llama_rules(layer: str, stack: Mapping[str, int], embed: str | list[str]) -> list[RuleLike]:
    # LlamaModel has no prefix, LlamaForCausalLM has one.
    prefix = r"(?:model\.)?"
    linear = {"transform": "transpose", **stack}
    block = rf"{prefix}layers\.(\d+)\."
    projections = zip("qkvo", (*_QUERY_KEY_VALUE, "out"), strict=True)
    return [
        (rf"{block}self_attn\.rotary_emb", None),  # the frequencies, in files of older versions
        *(
            (rf"{block}self_attn\.{name}_proj", f"{layer}.attn.{new}", linear)
            for name, new in projections
        ),
        *(
            (rf"{block}mlp\.{name}_proj", f"{layer}.mlp.{name}", linear)
            for name in ("gate", "up", "down")
        ),
        (rf"{block}input_layernorm", f"{layer}.attn_norm", stack),
        (rf"{block}post_attention_layernorm", f"{layer}.mlp_norm", stack),
        (rf"{prefix}embed_tokens", embed),
        (rf"{prefix}norm", "norm"),
    ]


def list_tensors(config: Config) -> Shapes:
    """Return the shapes of a language model's weights by name, as `transformers` writes them."""
    a = transformer_arguments(config)
    width = a["width"]
    mlp = a["mlp_width"]
    attention_bias = a["bias"] in (True, "attention")
    mlp_bias = a["bias"] in (True, "mlp")
    shapes: Shapes = {}

    def add(name: str, *shape: int, biased: bool = True) -> None:
        shapes[f"{name}.weight"] = shape
        if biased:  # as many as there are outputs
            shapes[f"{name}.bias"] = shape[-1:] if config["model_type"] == "gpt2" else shape[:1]

    if config["model_type"] == "gpt2":
        add("transformer.wte", a["vocab_size"], width, biased=False)
        add("transformer.wpe", a["max_length"], width, biased=False)
        for i in range(a["depth"]):
            block = f"transformer.h.{i}."
            add(f"{block}ln_1", width)
            add(f"{block}attn.c_attn", width, 3 * width)
            add(f"{block}attn.c_proj", width, width)
            add(f"{block}ln_2", width)
            add(f"{block}mlp.c_fc", width, mlp)
            add(f"{block}mlp.c_proj", mlp, width)
        add("transformer.ln_f", width)
    else:
        queries, keys = (a[heads] * a["head_size"] for heads in ("heads", "kv_heads"))
        add("model.embed_tokens", a["vocab_size"], width, biased=False)
        for i in range(a["depth"]):
            block = f"model.layers.{i}."
            for name, size in zip("qkv", (queries, keys, keys), strict=True):
                add(f"{block}self_attn.{name}_proj", size, width, biased=attention_bias)
            add(f"{block}self_attn.o_proj", width, queries, biased=attention_bias)
            add(f"{block}mlp.gate_proj", mlp, width, biased=mlp_bias)
            add(f"{block}mlp.up_proj", mlp, width, biased=mlp_bias)
            add(f"{block}mlp.down_proj", width, mlp, biased=mlp_bias)
            add(f"{block}input_layernorm", width, biased=False)
            add(f"{block}post_attention_layernorm", width, biased=False)
        add("model.norm", width, biased=False)
    if not a["tied"]:
        add("lm_head", a["vocab_size"], width, biased=False)
    return shapes
