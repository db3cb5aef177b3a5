"""Constructors with learning rates that decrease layer by layer from the head to the stem."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jengine.config import paths
from jengine.config.annotations import is_mapping
from jengine.config.errors import ArgumentError, ConfigError, closest
from jengine.config.registry import OPTIM_WRAPPER_CONSTRUCTORS
from jengine.extras.optimizers import layer_depth
from jengine.extras.optimizers.layer_depth import STEM, LayerPattern
from jengine.optim.param_groups.constructor import (
    DECAY_RULES,
    DefaultOptimWrapperConstructor,
)
from jengine.optim.param_groups.modules import (
    Module,
    Parameter,
    ParamsSource,
)
from jengine.optim.param_groups.paramwise_cfg import check_value

logger = logging.getLogger("jengine")

LayerId: TypeAlias = Callable[[str], int]
# The name of a parameter that identifies its layer; for a stacked parameter, a function from layer
# to name.
NameOf: TypeAlias = Callable[[Parameter], str | Callable[[int], str]]


class LayerParameter(NamedTuple):
    """A parameter, or one layer of a parameter in which `nn.scan` stacks all layers."""

    path: str  # dotted path; with [i] for layer i of a stacked parameter
    # as in a model without stacked layers; in PyTorch's alias for rules adopted from PyTorch
    # projects
    name: str
    parameter: Parameter
    module: Module


class ParameterDecay(NamedTuple):
    """A parameter's weight decay and the rules that set it."""

    parameter: LayerParameter
    weight_decay: float
    patterns: tuple[str, ...] = ()


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LearningRateDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Constructor with layer-wise learning rates as in MMSelfSup: `lr * layer_decay_rate ** (N - id
    - 1)`, N layers.

    Settings, in the `optimizer` of the config (MMSelfSup) or in `paramwise_cfg` (MMPretrain):
      layer_decay_rate: the factor from layer to layer; 1.0 by default, with a warning.
      model_type: 'vit', 'swin' or 'mixmim', for models with these names.
      layer_pattern: instead of model_type, for any model: a regular expression with a group around
        the layer number, such as r'encoderblock_(\\d+)'; see `LayerPattern`.
      stem_pattern: with layer_pattern, matches the parameters outside the layers that belong to
        layer 0.

    >>> import jax.numpy as jnp
    >>> cfg = dict(optimizer=dict(type="AdamW", lr=1.0, weight_decay=0.1))
    >>> rules = dict(layer_pattern=r"block_(\\d+)", layer_decay_rate=0.5)
    >>> params = {
    ...     name: {"kernel": jnp.ones((2, 2))} for name in ("embed", "block_0", "block_1", "head")
    ... }
    >>> LearningRateDecayOptimWrapperConstructor(cfg, rules)(params).get_lr()["lr"]
    [0.125, 0.25, 0.5, 1.0]

    Weight decay follows `paramwise_cfg`: custom_keys (decay_mult), norm_decay_mult,
    bias_decay_mult, dwconv_decay_mult and flat_decay_mult; learning-rate multipliers are ignored
    with a warning.

    Args:
      optim_wrapper_cfg: see DefaultOptimWrapperConstructor.
      paramwise_cfg: the rules above, and `strict_upstream=True` for decay as in MMSelfSup: the
        shortest matching custom key is used, other rules are ignored, and a layer has at most one
        non-zero decay.

    Raises:
      ArgumentError: unknown or missing model_type without a layer_pattern, or no weight_decay.
        ConfigError: a setting with the wrong type, or given twice; when called: a model whose
        layers are not recognised.
    """

    _SETTINGS = ("model_type", "layer_decay_rate", "layer_pattern", "stem_pattern")
    paramwise_keys = (*DefaultOptimWrapperConstructor.paramwise_keys, "strict_upstream", *_SETTINGS)

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        if not is_mapping(self.optimizer_cfg):
            raise ConfigError(
                f"layer decay: `optimizer` must be a config, got {self.optimizer_cfg!r}"
            )
        settings = {
            name: self.paramwise_cfg[name] for name in self._SETTINGS if name in self.paramwise_cfg
        }
        # A copy, as the settings are taken out of it: the optimizer does not know them.
        self.optimizer_cfg = dict(self.optimizer_cfg)
        for name in self._SETTINGS:
            if name in settings and name in self.optimizer_cfg:
                raise ConfigError(
                    f"`{name}` must be in `optimizer` or in `paramwise_cfg`, got both"
                )
            if name in self.optimizer_cfg:
                settings[name] = self.optimizer_cfg.pop(name)
        self.model_type = settings.get("model_type")
        self.pattern = _parse_layer_pattern(settings)
        if self.pattern is not None and self.model_type is not None:
            raise ConfigError(
                "layer decay: one of `model_type` and `layer_pattern` must be given, got "
                f"{self.model_type!r} and {self.pattern.pattern!r}"
            )
        if self.pattern is None and self.model_type not in (known := ("vit", "swin", "mixmim")):
            raise ArgumentError(
                f"`optimizer.model_type` must be one of {known}, got {self.model_type!r}"
                f"{closest(str(self.model_type), known)}; for other models set `layer_pattern`"
            )
        if "layer_decay_rate" not in settings:
            logger.warning(
                "layer_decay_rate is not set and defaults to 1: all layers have the same learning "
                "rate"
            )
        self.decay_rate = settings.get("layer_decay_rate", 1.0)
        _check_rate("layer_decay_rate", self.decay_rate)

    def __call__(self, model: ParamsSource, module_types: Mapping[str, str] | None = None) -> Any:
        """Build the wrapper; see DefaultOptimWrapperConstructor."""
        self.warn_of_learning_rate_rules()
        params, types = self.get_params(model, module_types)
        self.read_optimizer()
        self.require_base_lr("layer decay")
        if self.base_wd is None:
            raise ArgumentError(
                "`optimizer.weight_decay` must be set for layer-wise learning rates, got none"
            )
        root = self.module_tree()
        parameters = list_layer_parameters(root, names_of(root, self.pattern))
        trained = [
            p
            for p in parameters
            if self.custom_settings(p.parameter.path).get("requires_grad", True)
        ]
        layer_id, layers, expected = self.layers([parameter.name for parameter in trained])
        is_strict = bool(self.paramwise_cfg.get("strict_upstream"))
        decays = [
            self._upstream_decay(p) if is_strict else self._parameter_decay(p) for p in trained
        ]
        # Without blocks the names do not fit at all; beside them `layers` counts two more, for
        # mixmim one.
        check_layers(
            trained, layer_id, expected, layers - (1 if self.model_type == "mixmim" else 2)
        )
        # After the decays, which record what they match. MMSelfSup knows custom_keys only, so its
        # mode reports no rules.
        self.report_unmatched(params, types, () if is_strict else DECAY_RULES)
        groups = layer_groups(
            decays,
            layer_id,
            lambda layer: self.decay_rate ** (layers - layer - 1),
            self.base_settings,
            collapse=is_strict,
        )
        return self.wrap(params, groups)

    def layers(self, names: Sequence[str]) -> tuple[LayerId, int, str]:
        """Return from all parameter names a function name -> layer, the number of layers, and
        the expected names.
        """
        if self.pattern is not None:
            return *self.pattern.number(
                names
            ), f"as layer_pattern=r'{self.pattern.pattern}' matches"
        if self.model_type == "vit":
            layers = layer_depth.count_below(names, "backbone.layers") + 2
            expected = (
                "`backbone.layers.0`, `backbone.patch_embed`, ..., as model_type='vit' expects"
            )
            # Closures over the count: the layer of a head is the last one, which only the whole
            # model tells.
            return lambda name: layer_depth.vit_layer_id(name, layers), layers, expected
        is_swin = self.model_type == "swin"
        stages, layer_id = (
            ("stages", layer_depth.swin_layer_id)
            if is_swin
            else ("layers", layer_depth.mixmim_layer_id)
        )
        depths = layer_depth.stage_depths(names, f"backbone.{stages}")
        expected = f"`backbone.{stages}.0.blocks.0`, ..., as model_type={self.model_type!r} expects"
        return lambda name: layer_id(name, depths), sum(depths) + (2 if is_swin else 1), expected

    def warn_of_learning_rate_rules(self) -> None:
        """Warn of rules without effect, because the learning rate depends only on the layer."""
        ignored = [
            key
            for key in ("bias_lr_mult", "dcn_offset_lr_mult")
            if self.paramwise_cfg.get(key) is not None
        ]
        ignored += [
            f"custom_keys[{key!r}].{setting}"
            for key, rule in self.paramwise_cfg.get("custom_keys", {}).items()
            for setting in rule
            if setting not in ("decay_mult", "requires_grad")
        ]
        if ignored:
            logger.warning(
                "ignored, because the learning rate depends only on the layer: %s",
                ", ".join(ignored),
            )

    def _parameter_decay(self, parameter: LayerParameter) -> ParameterDecay:
        path = parameter.parameter.path
        custom = self.custom_settings(path)
        typed = self.typed_settings(
            path.rpartition(".")[2], parameter.parameter, parameter.module, False
        )
        patterns = tuple(rule for rule in typed.get("patterns", ()) if rule.endswith("decay_mult"))
        if not custom or (self.paramwise_cfg.get("force_default_settings") and patterns):
            base = self.base_settings(path)["weight_decay"]
            return ParameterDecay(parameter, typed.get("weight_decay", base), patterns)
        return ParameterDecay(parameter, custom["weight_decay"], custom["patterns"])

    def _upstream_decay(self, parameter: LayerParameter) -> ParameterDecay:
        base = self.base_settings(parameter.parameter.path)["weight_decay"]
        decay = ParameterDecay(parameter, base)
        custom_keys = self.paramwise_cfg.get("custom_keys", {})
        # Without `break`, as in MMSelfSup: the last match, which is the shortest key, decides.
        for key in sorted(sorted(custom_keys), key=len, reverse=True):
            if key in parameter.name or key in parameter.path:
                self.matched.add(key)
                decay = ParameterDecay(
                    parameter, base * custom_keys[key].get("decay_mult", 1.0), (key,)
                )
        return decay


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LearningRateDecayOptimizerConstructor(DefaultOptimWrapperConstructor):
    """Constructor with layer- or stage-wise learning rates as in MMSegmentation: `lr * decay_rate
    ** (L - id - 1)`.

    L is num_layers + 2. One-dimensional parameters and biases have no weight decay.

    Args:
      optim_wrapper_cfg: see DefaultOptimWrapperConstructor.
      paramwise_cfg: `num_layers` (int), `decay_rate`, `decay_type`, 'layer_wise' (default) or
        'stage_wise', and `backbone`, 'ConvNeXt', 'BEiT' or 'MAE', if the class name of the module
        `backbone` does not contain one of these. For any other model `decay_rate` and
        `layer_pattern`, a regular expression with a group around the layer number (and optionally
        `stem_pattern`, see `LayerPattern`); `num_layers` is then counted. Without num_layers,
        decay_rate and layer_pattern, one group is built, with a warning. Other keys are ignored,
        with a warning.

    Raises:
      ValueError: an unknown decay_type. ConfigError: missing settings or wrong types; when called:
        a model whose layers are not recognised. NotImplementedError, when called: another backbone,
        or 'stage_wise' for a backbone that is not a ConvNeXt.
    """

    paramwise_keys = ()  # unknown keys are a warning, not an error
    _OWN_KEYS = (
        "num_layers",
        "decay_rate",
        "decay_type",
        "backbone",
        "layer_pattern",
        "stem_pattern",
        "roles",
    )

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        cfg = self.paramwise_cfg
        self.decay_type = cfg.get("decay_type", "layer_wise")
        # A part of the string, as in MMSegmentation, where the old name says 'layer_wise_vit'.
        if "layer_wise" not in self.decay_type and self.decay_type != "stage_wise":
            known = ("layer_wise", "stage_wise")
            raise ValueError(
                f"`paramwise_cfg.decay_type` must be one of {known}, got {self.decay_type!r}"
                f"{closest(self.decay_type, known)}"
            )
        self.pattern = _parse_layer_pattern(cfg)
        self.is_set = any(name in cfg for name in ("num_layers", "decay_rate", "layer_pattern"))
        if self.is_set:
            if "decay_rate" not in cfg or (self.pattern is None and "num_layers" not in cfg):
                raise ConfigError(
                    "`paramwise_cfg` must have decay_rate with num_layers or layer_pattern, got "
                    f"{sorted(cfg)}"
                )
            _check_rate("paramwise_cfg.decay_rate", cfg["decay_rate"])
            layers = cfg.get("num_layers", 1)
            if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
                raise ConfigError(
                    f"`paramwise_cfg.num_layers` must be an int of at least 1, got {layers!r}"
                )
            if self.pattern is not None and self.decay_type == "stage_wise":
                raise ConfigError(
                    "`paramwise_cfg.decay_type` must be 'layer_wise' with layer_pattern, got "
                    "'stage_wise'"
                )

    def __call__(self, model: ParamsSource, module_types: Mapping[str, str] | None = None) -> Any:
        """Build the wrapper; see DefaultOptimWrapperConstructor."""
        params, types = self.get_params(model, module_types)
        if not self.is_set:
            logger.warning(
                "paramwise_cfg has no num_layers and decay_rate: all layers have the same "
                "learning rate"
            )
            return self.wrap(params, None)
        ignored = [key for key in self.paramwise_cfg if key not in self._OWN_KEYS]
        if ignored:
            logger.warning(
                "paramwise_cfg: ignored by %s: %s", type(self).__name__, ", ".join(ignored)
            )
        # unlike `read_optimizer`, without a check of the custom keys, which are ignored here
        self.read_defaults()
        self.require_base_lr("layer decay")
        root = self.module_tree()
        parameters = list_layer_parameters(root, names_of(root, self.pattern))
        # Fixed rules, as in MMSegmentation, which has no multipliers here.
        decays = [
            ParameterDecay(
                p,
                self.base_settings(p.parameter.path).get("weight_decay", 0.0)
                if _is_decayed(p)
                else 0.0,
            )
            for p in parameters
        ]
        rate = self.paramwise_cfg["decay_rate"]
        if self.pattern is None:
            layers = self.paramwise_cfg["num_layers"] + 2
            blocks = None
            backbone = self.paramwise_cfg.get("backbone") or types.get("backbone", "")
            layer_id = self.layer_id(backbone)
            expected = (
                f"`backbone.{'stages' if 'ConvNeXt' in backbone else 'layers'}.0`, ..., as of a "
                f"{backbone}"
            )
        else:
            layer_id, layers = self.pattern.number([parameter.name for parameter in parameters])
            blocks = layers - 2
            expected = f"as layer_pattern=r'{self.pattern.pattern}' matches"
        check_layers(parameters, layer_id, expected, blocks)
        if blocks is not None and self.paramwise_cfg.get("num_layers", blocks) != blocks:
            raise ConfigError(
                f"`paramwise_cfg.num_layers` must be {blocks}, which layer_pattern counts, "
                f"got {self.paramwise_cfg['num_layers']}; remove it"
            )
        groups = layer_groups(
            decays,
            layer_id,
            lambda layer: rate ** (layers - layer - 1),
            self.base_settings,
        )
        return self.wrap(params, groups)

    def layer_id(self, backbone: str) -> LayerId:
        """Return a function name -> layer for a backbone class."""
        layers = self.paramwise_cfg["num_layers"]
        if "ConvNeXt" in backbone:
            if self.decay_type == "stage_wise":
                return lambda name: layer_depth.convnext_stage_id(name, layers + 2)
            return lambda name: layer_depth.convnext_layer_id(name, layers)
        if ("BEiT" in backbone or "MAE" in backbone) and self.decay_type != "stage_wise":
            return lambda name: layer_depth.vit_layer_id(name, layers + 2)
        raise NotImplementedError(
            "the backbone must be a ConvNeXt, or with layer_wise learning rates a BEiT or MAE, "
            f"got backbone {backbone or 'of unknown class'!r} with {self.decay_type}; set "
            "paramwise_cfg['backbone'] to the most similar of these, or "
            "paramwise_cfg['layer_pattern'] to a pattern for the layers"
        )


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimizerConstructor(LearningRateDecayOptimizerConstructor):
    """Constructor with MMSegmentation's older settings: `num_layers` and `layer_decay_rate`, now
    called `decay_rate`.

    Args:
      optim_wrapper_cfg: see DefaultOptimWrapperConstructor.
      paramwise_cfg: see LearningRateDecayOptimizerConstructor; decay is layer-wise.

    Raises:
      ConfigError: no layer_decay_rate.
    """

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        cfg = dict(paramwise_cfg or {})
        if "layer_decay_rate" not in cfg or "decay_rate" in cfg:
            raise ConfigError(
                f"`paramwise_cfg` must have layer_decay_rate and not decay_rate, got {sorted(cfg)}"
            )
        logger.warning(
            "LayerDecayOptimizerConstructor is the old name of "
            "LearningRateDecayOptimizerConstructor, and "
            "layer_decay_rate the old name of decay_rate"
        )
        decay_rate = cfg.pop("layer_decay_rate")
        super().__init__(
            optim_wrapper_cfg, {**cfg, "decay_rate": decay_rate, "decay_type": "layer_wise_vit"}
        )


def list_layer_parameters(root: Module, name_of: NameOf) -> list[LayerParameter]:
    """Return all parameters in model order, stacked ones layer by layer.

    Raise ValueError if these disagree.
    """
    parameters: list[LayerParameter] = []
    layers: dict[str, int] = {}
    for module in root.walk():
        for parameter in module.parameters.values():
            name = name_of(parameter)
            if isinstance(name, str):
                parameters.append(LayerParameter(parameter.path, name, parameter, module))
                continue
            if not parameter.stacked:  # which only the pattern tells
                parameter.stacked = (0,)
            layers[parameter.path] = parameter.shape[0] if parameter.shape else 0
            parameters += [
                LayerParameter(f"{parameter.path}[{i}]", name(i), parameter, module)
                for i in range(layers[parameter.path])
            ]
    # Two stacks of different depth have two numberings, and a common decay would pair layers that
    # do not correspond.
    if len(set(layers.values())) > 1:
        raise ValueError(f"stacked parameters must have the same number of layers, got {layers}")
    return parameters


def names_of(root: Module, pattern: LayerPattern | None) -> NameOf:
    """Return PyTorch's names.

    With a pattern Flax's, with layer numbers where `pattern` finds stacked parameters.
    """
    if pattern is None:
        return _torch_name
    stacked = pattern.find_stacked(
        {parameter.path: parameter for _, parameter in root.named_parameters()}
    )
    return lambda parameter: stacked.get(parameter.path, parameter.path)


def layer_groups(
    decays: Sequence[ParameterDecay],
    layer_id: LayerId,
    scale: Callable[[int], float],
    base: Callable[[str], Mapping[str, Any]],
    collapse: bool = False,
) -> list[dict[str, Any]]:
    """Return parameter groups by layer and weight decay, in the order of the first parameters.

    They are called `layer_ID_decay` and `layer_ID_no_decay`, and have lr, weight_decay, lr_scale
    and group_name.

    `base` returns the settings of the parameter at a path before the layer decay. With `collapse`
    the first non-zero decay in a layer is used for all parameters in it that decay.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for parameter, weight_decay, patterns in decays:
        layer = layer_id(parameter.name)
        name = f"layer_{layer}_{'decay' if weight_decay else 'no_decay'}"
        own = base(parameter.parameter.path)
        settings = {**own, "weight_decay": weight_decay, "lr": own["lr"] * scale(layer)}
        settings |= {"lr_scale": scale(layer), "group_name": name}
        # MMSelfSup's groups are by name alone; two decays in one layer would be lost there.
        key = (name, repr(own)) if collapse else repr(settings)
        group = groups.setdefault(key, {"params": [], "patterns": [], **settings})
        group["params"].append(parameter.path)
        group["patterns"] += [pattern for pattern in patterns if pattern not in group["patterns"]]
    logger.debug(
        "Param groups = %s", json.dumps({g["group_name"]: g for g in groups.values()}, indent=2)
    )
    return list(groups.values())


def check_layers(
    parameters: Sequence[LayerParameter],
    layer_id: LayerId,
    expected: str,
    blocks: int | None = None,
) -> None:
    """Raise ConfigError without layers, or if all parameters are in one, so that all learning rates
    would be equal.

    `blocks` is the number of layers found, None if they are not counted; `expected` names are for
    the message.
    """
    # All parameters in one layer: the pattern or the names do not fit the model, and the decay
    # would be a constant factor.
    if blocks != 0 and len({layer_id(parameter.name) for parameter in parameters}) > 1:
        return
    names = list(dict.fromkeys(parameter.parameter.path for parameter in parameters))
    modules = list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))
    examples = ", ".join(modules[:8]) + (", ..." if len(modules) > 8 else "")
    pattern = _guess_layer_pattern(names)
    hint = (
        f"did you mean layer_pattern=r'{pattern}'?"
        if pattern
        else "set `layer_pattern` for other models"
    )
    raise ConfigError(
        f"layer decay: the parameters must be called {expected}, got {examples or 'none'}; {hint}"
    )


def _torch_name(parameter: Parameter) -> str | Callable[[int], str]:
    """Return the torch alias of a parameter, or for a parameter that stacks all layers, of each
    layer.
    """
    name = paths.torch_alias(parameter.path)
    suffix = name.removeprefix("backbone.layers.")
    if suffix == name or suffix.split(".")[0].isdigit():
        return name
    return lambda layer: f"backbone.layers.{layer}.{suffix}"


def _parse_layer_pattern(settings: Mapping[str, Any]) -> LayerPattern | None:
    if "layer_pattern" in settings:
        return LayerPattern(settings["layer_pattern"], settings.get("stem_pattern", STEM))
    if "stem_pattern" in settings:
        raise ConfigError("`layer_pattern` must be set with stem_pattern, got only stem_pattern")
    return None


def _check_rate(path: str, rate: object) -> None:
    check_value(path, "lr_mult", rate, 1.0)
    if rate == 0:
        raise ConfigError(f"`{path}` must be above 0, got {rate!r}")


def _is_decayed(parameter: LayerParameter) -> bool:
    name = parameter.name
    # MMSegmentation's rule: norms and biases have one axis; stacked ones are meant without the
    # layer axis.
    return not (
        parameter.parameter.is_flat or name.endswith(".bias") or name in ("pos_embed", "cls_token")
    )


def _guess_layer_pattern(names: Sequence[str]) -> str:
    """Return a pattern for the longest series of numbered modules; empty if there is none."""
    # The module with the most numbers is most probably the list of blocks.
    series: dict[str, set[str]] = {}
    for name in names:
        match = re.search(r"([A-Za-z]\w*)\.(\d+)\.", paths.torch_alias(name))
        if match:
            series.setdefault(match[1], set()).add(match[2])
    longest = max(series, key=lambda module: len(series[module]), default="")
    return rf"{longest}[._](\d+)" if longest and len(series[longest]) > 1 else ""
