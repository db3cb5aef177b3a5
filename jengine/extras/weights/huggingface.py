"""Models of the Hugging Face Hub: the network for a `config.json`, and the rules for the names of
its weights.

A directory of the Hub has `config.json`, whose `model_type` names the family, and safetensors
files. Each family is a `HubModel` in a module of its own, such as `hub_llama`, which an extra lists
in its section "hub_models".
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from jengine.config.annotations import Range, check_values
from jengine.config.errors import ConfigError
from jengine.config.json_codec import decode_object
from jengine.config.plugins import load_provided, provided
from jengine.config.registry import MODELS
from jengine.config.storage import read_bytes
from jengine.extras.weights.array_rules import RuleLike
from jengine.model.linen import LinenModel
from jengine.model.model import ModelWrapper

Config = Mapping[str, Any]  # the content of a `config.json`
Shapes = dict[str, tuple[int, ...]]
Size = Annotated[int, Range(ge=1, lt=2**31)]  # of an axis
Depth = Annotated[int, Range(ge=1, le=10_000)]

CONFIG = "config.json"
TRANSFORMER = "TransformerLM"
# Hugging Face's `gelu` is the exact one; `gelu_new` and `gelu_pytorch_tanh` are one approximation
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
# Settings that change no number here: names, tokens, dropout, initial values, memory, outputs, what
# old files store for generation, and a tie in networks without one. All others are read, or
# refused: a multiplier or a cap would be left out in silence.
_HARMLESS_KEYS = """
    _attn_implementation _commit_hash _name_or_path architectures attention_dropout
    attn_implementation attn_pdrop bad_words_ids begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample
    dropout dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initializer_factor initializer_range label2id length_penalty
    max_length max_position_embeddings min_length model_max_length model_type n_ctx
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id padding_side prefix pretraining_tp problem_type
    remove_invalid_values reorder_and_upcast_attn repetition_penalty resid_pdrop return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
_HARMLESS = frozenset(_HARMLESS_KEYS.split())
_HARMLESS_PREFIXES = ("summary_",)  # of a head for classes
_LAYER = r"layers_\1."  # in new names: one layer, or its place in a stack
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
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A family on the Hugging Face Hub: what its `model_type` stands for here.

    Extras provide families in the section "hub_models", by model type, with `_` for `-`.

    Attributes:
      module: name of the network in the registry `MODELS`.
      settings: dataclass of the settings in `config.json` that are known, with their types and the
        defaults in `transformers`. One that changes no number has the type `Any`, one with a single
        value that is supported a `Literal`. Others are refused.
      make_arguments: takes the `settings`, and returns the arguments of the network.
      rules: rules of `rename` from the names of the weights to those of the parameters, without
        which a name is not loaded. Rules that match nothing are left out.
      landmarks: regular expressions for parameters by which the network is known, in which groups
        have no meaning.
      describe: takes a network, and returns settings that do not show in the shapes of its
        parameters; None for all arguments but `num_classes`.
      list_tensors: takes the network's arguments, and returns the shapes of the weights by name, as
        `transformers` writes them; None for a family that is not exported.
    """

    module: str
    settings: type
    make_arguments: Callable[[Any], dict[str, Any]]
    rules: Sequence[RuleLike]
    landmarks: Sequence[str]
    describe: Callable[[Any], Mapping[str, Any]] | None = None
    list_tensors: Callable[[Mapping[str, Any]], Shapes] | None = None


def list_model_types() -> tuple[str, ...]:
    """Return the model types that are known."""
    return tuple(sorted(provided("hub_models")))


def find_family(model_type: Any) -> HubModel | None:
    """Return the family for a `model_type`; None if it is not known."""
    name = str(model_type).replace("-", "_")
    if name not in provided("hub_models"):
        return None
    family: HubModel = load_provided("hub_models", name)
    return family


def require_family(model_type: Any) -> HubModel:
    """Return the family for a `model_type`; ConfigError if it is not known."""
    if (family := find_family(model_type)) is None:
        raise ConfigError(
            f"`model_type` of a {CONFIG} must be one of {', '.join(list_model_types())}, got "
            f"{str(model_type)!r:.100}; a package adds another in its section 'hub_models': "
            "docs/pretrained.md"
        )
    return family


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


def hub_module(config: Config | str | os.PathLike[str]) -> dict[str, Any]:
    """Return the config of the network for a model of Hugging Face.

    Args:
      config: its `config.json`, read or as the path of its directory.

    Raises:
      ConfigError: an unknown model type, or a setting that the network does not have.

    >>> hub_module(dict(model_type="resnet", depths=[2, 2], hidden_sizes=[8, 16]))["depths"]
    (2, 2)
    """
    config = require_config(config)
    family = require_family(config.get("model_type"))
    return {"type": family.module, **_make_arguments(config, family)}


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
    arguments = hub_module(config)
    if (kind := arguments.pop("type")) != TRANSFORMER:
        raise ConfigError(
            f"`model_type` of a {CONFIG} must be that of a language model, got one of a {kind}: "
            "see `hub_module`"
        )
    return arguments


def _make_arguments(config: Config, family: HubModel) -> dict[str, Any]:
    settings = parse_settings(config, family.settings, family.module)
    try:
        arguments = family.make_arguments(settings)
        module = MODELS.get(family.module)(**arguments)
        if family.describe is not None:  # sizes that must divide each other, and the scaling
            family.describe(module)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a {CONFIG} must describe a model: {error}") from None
    return arguments


def parse_settings(config: Config, kind: type, module: str) -> Any:
    """Return the settings of a config as a dataclass.

    Args:
      config: as it is in the file, which may be from anyone.
      kind: the dataclass.
      module: the network, for messages.

    Raises:
      ConfigError: a setting that is missing, has another type, is out of range or is not known.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    known = {name: value for name, value in config.items() if name in fields}
    try:
        check_values(CONFIG, kind, known)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None
    for name, value in config.items():
        is_known = name in fields or name in _HARMLESS or name.startswith(_HARMLESS_PREFIXES)
        if not is_known and not is_neutral(name, value):
            expected = (
                f"{_NEUTRAL[name]} for {module}" if name in _NEUTRAL else f"a setting of {module}"
            )
            raise ConfigError(f"`{name}` of a {CONFIG} must be {expected}, got {value!r:.80}")
    for name, field in fields.items():
        if name not in known and field.default is dataclasses.MISSING:
            raise ConfigError(
                f"{name!r} of a {CONFIG} must be given for the model type "
                f"{config.get('model_type')!r}"
            )
    return kind(**known)


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a setting that a network does not have changes nothing."""
    return value is None or value in ({}, []) or (name in _NEUTRAL and value == _NEUTRAL[name])


def find_activation(name: str, known: Mapping[str, str] = ACTIVATIONS) -> str:
    """Return the name of an activation here; ConfigError if it is not known."""
    if name not in known:
        raise ConfigError(
            f"the activation of a {CONFIG} must be one of {sorted(known)}, got {name!r}"
        )
    return known[name]


def find_differences(config: Config, model: object) -> list[str]:
    """Return the settings of a network that differ from those of the weights, though all shapes may
    fit.

    >>> from jengine.extras.networks import TransformerLM
    >>> config = dict(model_type="gpt2", vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=5)
    >>> find_differences(
    ...     config, TransformerLM(**{**transformer_arguments(config), "activation": "gelu"})
    ... )
    ["activation is 'gelu', that of the weights is 'gelu_tanh'"]
    """
    while isinstance(model, ModelWrapper):  # such as LoRA
        model = model.model
    module = model.module if isinstance(model, LinenModel) else model
    family = find_family(config.get("model_type"))
    if family is None or not isinstance(module, MODELS.get_type(family.module)):
        return []
    arguments = _make_arguments(config, family)
    names = [name for name in arguments if name != "num_classes"]

    def describe(module: Any) -> Mapping[str, Any]:
        found = family.describe and family.describe(module)
        found = found or {name: getattr(module, name) for name in names}
        # a config may have lists
        return {k: tuple(x) if isinstance(x, list) else x for k, x in found.items()}

    actual = describe(module)
    return [
        f"{name} is {actual[name]!r}, that of the weights is {value!r}"
        for name, value in describe(MODELS.get(family.module)(**arguments)).items()
        if actual[name] != value
    ]


def choose_rules(
    config: Config, stored: Iterable[str], target: Iterable[str]
) -> Sequence[RuleLike]:
    """Return the rules of a config's model type for the parameters of its network; none for other
    parameters.
    """
    names = set(target)
    family = find_family(config.get("model_type"))
    if family is None or not all(
        any(re.fullmatch(landmark, name) for name in names) for landmark in family.landmarks
    ):
        return ()
    return make_rules(config["model_type"], stored, names, config)


def make_rules(
    model_type: str, stored: Iterable[str], target: Iterable[str], config: Config | None = None
) -> list[RuleLike]:
    r"""Return the rules of `rename` for the weights of a model.

    Args:
      model_type: one of `list_model_types`.
      stored: the names of the weights; rules for others are left out.
      target: the parameter paths of the network.
      config: the `config.json` next to the weights; None or {} without one.

    >>> make_rules("llama", ["model.norm.weight"], ["norm.scale"])
    [('(?:model\\.)?norm', 'norm')]
    """
    stored = list(stored)
    target = set(target)
    family = require_family(model_type)
    is_scanned = any(path.startswith("layers.") for path in target)
    has_head = any(path.startswith("head.") for path in target)
    # A tied file has one array for an untied model. Weights without an output layer, such as those
    # of LlamaModel, are others: their embedding is no output layer.
    defaults = {field.name: field.default for field in dataclasses.fields(family.settings)}
    usual = defaults.get("tie_word_embeddings", False)
    is_tied = (config or {}).get("tie_word_embeddings", usual or not config)
    copies = has_head and is_tied and not any(name.startswith("lm_head") for name in stored)
    rules: list[RuleLike] = []
    for rule in family.rules:
        old, new = rule[:2]
        options = dict(rule[2]) if len(rule) == 3 else {}
        # A rule that matches nothing is an error, and files differ in what they leave out
        patterns = [old] if isinstance(old, str) else old
        if not any(re.match(rf"(?:{p})(?=\.|$)", name) for p in patterns for name in stored):
            continue
        names = [new] if isinstance(new, str) else list(new or ())
        if names == ["head"] and not has_head:
            rules.append((old, None))
            continue
        if is_scanned and any(_LAYER in name for name in names):
            names = [name.replace(_LAYER, "layers.") for name in names]
            options["stack"] = 0
        if names == ["embed"] and copies:
            names.append("head")
        replaced = names[0] if len(names) == 1 else names or None
        rules.append((old, replaced, options) if options else (old, replaced))
    return rules


def list_tensors(config: Config) -> Shapes:
    """Return the shapes of a model's weights by name, as `transformers` writes them.

    Raises:
      ConfigError: an unknown model type, or one that is not exported.
    """
    family = require_family(config.get("model_type"))
    if family.list_tensors is None:
        known = [name for name in list_model_types() if require_family(name).list_tensors]
        raise ConfigError(
            f"`model_type` of a {CONFIG} must be one of {', '.join(known)} to be exported as a "
            f"directory of the Hub, got {config['model_type']!r}"
        )
    return family.list_tensors(_make_arguments(config, family))
