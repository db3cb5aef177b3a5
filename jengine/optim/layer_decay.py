"""Optimizer wrappers whose learning rate falls layer by layer from the head to the stem."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jengine import paths
from jengine.errors import closest
from jengine.optim import layer_ids
from jengine.optim.constructor import DefaultOptimWrapperConstructor
from jengine.optim.model_params import params_of
from jengine.optim.modules import Module, Parameter, module_tree
from jengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

logger = logging.getLogger("jengine")

LayerId = Callable[[str], int]


class Entry(NamedTuple):
    """A parameter, or one layer of a parameter in which `nn.scan` stacks all layers."""

    path: str  # dotted path; with [i] for layer i of a stacked parameter
    name: str  # PyTorch's name, as that of a model whose layers are not stacked
    ndim: int  # without the stacked axis
    parameter: Parameter
    module: Module


def entries(root: Module, stacked: str = "backbone.layers") -> list[Entry]:
    """All parameters in the order of the model, stacked ones layer by layer.

    Args:
      root: the model.
      stacked: the module whose parameters have all layers along their first axis, if what follows it is no number.

    Raises:
      ValueError: parameters below `stacked` with different numbers of layers.
    """
    found: list[Entry] = []
    layers: dict[str, int] = {}
    for module in _modules(root):
        for parameter in module.parameters.values():
            name = paths.torch_alias(parameter.path)
            rest = name.removeprefix(f"{stacked}.")
            if rest == name or rest.split(".")[0].isdigit():
                found.append(Entry(parameter.path, name, parameter.ndim, parameter, module))
                continue
            layers[parameter.path] = parameter.shape[0] if parameter.shape else 0
            found += [
                Entry(f"{parameter.path}[{i}]", f"{stacked}.{i}.{rest}", parameter.ndim - 1, parameter, module)
                for i in range(layers[parameter.path])
            ]
    if len(set(layers.values())) > 1:
        raise ValueError(f"the parameters below {stacked!r} are stacked with different numbers of layers: {layers}")
    return found


def _modules(root: Module) -> list[Module]:
    return [root, *(below for child in root.children.values() for below in _modules(child))]


def layer_groups(
    members: Sequence[tuple[Entry, float]], layer_id: LayerId, scale: Callable[[int], float], base_lr: float,
    collapse: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """The parameter groups of a model by layer and weight decay, in the order of their first parameter.

    Args:
      members: parameters and their weight decays.
      layer_id: the layer of a name.
      scale: the factor of a layer's learning rate.
      base_lr: the learning rate at factor 1.
      collapse: a layer's decays other than 0 become that of its first parameter.

    Returns:
      Groups called `layer_ID_decay` and `layer_ID_no_decay`, settings lr, weight_decay, lr_scale and group_name.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for entry, weight_decay in members:
        layer = layer_id(entry.name)
        name = f"layer_{layer}_{'decay' if weight_decay else 'no_decay'}"
        group = groups.setdefault(
            name if collapse else (name, weight_decay),
            {
                "params": [],
                "weight_decay": weight_decay,
                "lr_scale": scale(layer),
                "group_name": name,
                "lr": base_lr * scale(layer),
            },
        )
        group["params"].append(entry.path)
    logger.info("Param groups = %s", json.dumps({g["group_name"]: g for g in groups.values()}, indent=2))
    return list(groups.values())


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LearningRateDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Layer-wise learning rates as in MMSelfSup: `lr * layer_decay_rate ** (N - id - 1)` for layer `id` of N.

    The `optimizer` of the config takes two settings more: `model_type`, 'vit', 'swin' or 'mixmim', and
    `layer_decay_rate`, 1.0 by default. Weight decay follows `paramwise_cfg`: custom_keys (decay_mult), norm_decay_mult,
    bias_decay_mult, dwconv_decay_mult and flat_decay_mult; learning-rate multipliers are ignored with a warning.

    Args:
      optim_wrapper_cfg: see DefaultOptimWrapperConstructor.
      paramwise_cfg: as said above, and `strict_upstream=True` for MMSelfSup's own handling of decay: the shortest
        matching custom key wins, the other rules are ignored, and a layer has one decay other than 0.

    Raises:
      AssertionError: unknown or missing model_type, or no weight_decay.
    """

    paramwise_keys = (*DefaultOptimWrapperConstructor.paramwise_keys, "strict_upstream")

    def __init__(self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        cfg = dict(self.optimizer_cfg)
        self.model_type = cfg.pop("model_type", None)
        self.decay_rate = cfg.pop("layer_decay_rate", 1.0)
        self.optimizer_cfg = cfg
        if self.model_type not in ("vit", "swin", "mixmim"):
            known = ("vit", "swin", "mixmim")
            hint = closest(str(self.model_type), known)
            raise AssertionError(f"optimizer.model_type must be one of {known}, found {self.model_type!r}{hint}")
        if self.base_wd is None:
            raise AssertionError("layer-wise learning rates need a weight_decay in the optimizer's config")

    def __call__(self, model: Any, module_types: Mapping[str, str] | None = None) -> Any:
        """Builds the wrapper; see DefaultOptimWrapperConstructor."""
        self.warn_of_learning_rate_rules()
        params, types = params_of(model, module_types)
        self.read_optimizer()
        members = [entry for entry in entries(module_tree(params, types)) if self._is_trained(entry)]
        layer_id, layers = self.layers([entry.name for entry in members])
        strict = bool(self.paramwise_cfg.get("strict_upstream"))
        decays = [(entry, self._upstream_decay(entry) if strict else self._decay(entry)) for entry in members]
        self.report_unmatched(params)
        groups = layer_groups(
            decays, layer_id, lambda layer: self.decay_rate ** (layers - layer - 1), self.base_lr, collapse=strict
        )
        return self.wrap(params, groups)

    def layers(self, names: Sequence[str]) -> tuple[LayerId, int]:
        """The function that numbers layers, and how many there are, for a model with parameters `names`."""
        if self.model_type == "vit":
            layers = layer_ids.count_below(names, "backbone.layers") + 2
            return lambda name: layer_ids.vit_id(name, layers), layers
        if self.model_type == "swin":
            depths = layer_ids.stage_depths(names, "backbone.stages")
            return lambda name: layer_ids.swin_id(name, depths), sum(depths) + 2
        depths = layer_ids.stage_depths(names, "backbone.layers")
        return lambda name: layer_ids.mixmim_id(name, depths), sum(depths) + 1

    def warn_of_learning_rate_rules(self) -> None:
        """Says which rules have no effect because the layer alone decides the learning rate."""
        ignored = [key for key in ("bias_lr_mult", "dcn_offset_lr_mult") if self.paramwise_cfg.get(key) is not None]
        ignored += [
            f"custom_keys[{key!r}].{setting}"
            for key, rule in self.paramwise_cfg.get("custom_keys", {}).items()
            for setting in rule
            if setting not in ("decay_mult", "requires_grad")
        ]
        if ignored:
            logger.warning("ignored, for the layer alone decides the learning rate: %s", ", ".join(ignored))

    def _is_trained(self, entry: Entry) -> bool:
        return bool(self.custom_settings(entry.parameter.path).get("requires_grad", True))

    def _decay(self, entry: Entry) -> float:
        leaf = entry.parameter.path.rpartition(".")[2]
        custom = self.custom_settings(entry.parameter.path)
        if custom:
            return custom["weight_decay"]
        # a stacked parameter counts with the axes of one of its layers
        shape = entry.parameter.shape[len(entry.parameter.shape) - entry.ndim :]
        single = Parameter(entry.parameter.path, shape, entry.parameter.dtype)
        return self.typed_settings(leaf, single, entry.module, False).get("weight_decay", self.base_wd)

    def _upstream_decay(self, entry: Entry) -> float:
        weight_decay = self.base_wd
        custom_keys = self.paramwise_cfg.get("custom_keys", {})
        for key in sorted(sorted(custom_keys), key=len, reverse=True):
            if key in entry.name or key in entry.path:
                self.matched.add(key)
                weight_decay = self.base_wd * custom_keys[key].get("decay_mult", 1.0)
        return weight_decay


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LearningRateDecayOptimizerConstructor(DefaultOptimWrapperConstructor):
    """Layer-wise or stage-wise learning rates as in MMSegmentation: `lr * decay_rate ** (L - id - 1)`.

    L is num_layers + 2. One-dimensional parameters and biases have no weight decay.

    Args:
      optim_wrapper_cfg: see DefaultOptimWrapperConstructor.
      paramwise_cfg: `num_layers` (int), `decay_rate`, `decay_type`, 'layer_wise' (default) or 'stage_wise', and
        `backbone`, 'ConvNeXt', 'BEiT' or 'MAE', where the class name of the module `backbone` does not contain one of
        these. Without num_layers or decay_rate one group is built, with a warning; other keys are ignored with one.

    Raises:
      ValueError: an unknown decay_type. NotImplementedError, when called: another backbone, or 'stage_wise' for one
        that is no ConvNeXt.
    """

    paramwise_keys = ()  # it warns of what it ignores
    _OWN_KEYS = ("num_layers", "decay_rate", "decay_type", "backbone")

    def __init__(self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        self.decay_type = self.paramwise_cfg.get("decay_type", "layer_wise")
        if "layer_wise" not in self.decay_type and self.decay_type != "stage_wise":
            known = ("layer_wise", "stage_wise")
            raise ValueError(f"paramwise_cfg: unknown decay_type {self.decay_type!r}{closest(self.decay_type, known)}")

    def __call__(self, model: Any, module_types: Mapping[str, str] | None = None) -> Any:
        """Builds the wrapper; see DefaultOptimWrapperConstructor."""
        params, types = params_of(model, module_types)
        if not {"num_layers", "decay_rate"} <= set(self.paramwise_cfg):
            logger.warning("paramwise_cfg has no num_layers and decay_rate: all layers get the same learning rate")
            return self.wrap(params, None)
        ignored = [key for key in self.paramwise_cfg if key not in self._OWN_KEYS]
        if ignored:
            logger.warning("paramwise_cfg: ignored by %s: %s", type(self).__name__, ", ".join(ignored))
        rate, layers = self.paramwise_cfg["decay_rate"], self.paramwise_cfg["num_layers"] + 2
        self.read_optimizer()
        layer_id = self.layer_id(self.paramwise_cfg.get("backbone") or types.get("backbone", ""))
        decays = [
            (entry, 0.0 if _undecayed(entry) else self.base_wd or 0.0) for entry in entries(module_tree(params, types))
        ]
        groups = layer_groups(decays, layer_id, lambda layer: rate ** (layers - layer - 1), self.base_lr)
        return self.wrap(params, groups)

    def layer_id(self, backbone: str) -> LayerId:
        """The function that numbers the layers of a backbone of class `backbone`."""
        layers = self.paramwise_cfg["num_layers"]
        if "ConvNeXt" in backbone:
            if self.decay_type == "stage_wise":
                return lambda name: layer_ids.convnext_stage_id(name, layers + 2)
            return lambda name: layer_ids.convnext_layer_id(name, layers)
        if ("BEiT" in backbone or "MAE" in backbone) and self.decay_type != "stage_wise":
            return lambda name: layer_ids.vit_id(name, layers + 2)
        raise NotImplementedError(
            f"{self.decay_type} learning rates for a backbone {backbone or 'of unknown class'!r}: known are ConvNeXt, "
            "and layer_wise BEiT and MAE; name the closest as paramwise_cfg['backbone'], or write a constructor"
        )


def _undecayed(entry: Entry) -> bool:
    return entry.ndim == 1 or entry.name.endswith(".bias") or entry.name in ("pos_embed", "cls_token")
