"""iMIX's optimizer constructors, which set learning rates and decays for vision-and-language
models.

The rules are those in `imix/solver/default_constructor.py` of https://github.com/inspur-hsslab/iMIX
(v0.1.1). They match the names in PyTorch's BERT, to which Flax parameters are mapped by their torch
alias; a module is also a `LayerNorm` by its class, or by Flax's default name (`LayerNorm_0`).

Differences from iMIX: `paramwise_cfg` works with DefaultOptimizerConstructor;
DevlbertOptimizerConstructor exempts biases and norms from decay instead of everything else
(`strict_upstream=True` restores iMIX's behavior); a listed language weight matches inside any outer
module; and a setting that matches no parameter is an error.
"""

import logging
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from jengine.config import paths
from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError
from jengine.config.json_codec import decode
from jengine.config.registry import OPTIM_WRAPPER_CONSTRUCTORS
from jengine.config.storage import read_bytes
from jengine.model.module_types import kind_of
from jengine.optim.param_groups.constructor import DefaultOptimWrapperConstructor, merge_equal
from jengine.optim.param_groups.modules import (
    Module,
    Parameter,
    ParamsSource,
)
from jengine.optim.param_groups.paramwise_cfg import check_value

logger = logging.getLogger("jengine")

_NO_DECAY = ("bias", "LayerNorm.bias", "LayerNorm.weight")
_WEIGHT_DECAY = 0.01  # of Bert, Vilbert and Devlbert, independent of the optimizer's
_FROM_SCRATCH_LR = 1e-4  # of Vilbert and Devlbert, for parameters that were not pre-trained


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimizerConstructor(DefaultOptimWrapperConstructor):
    """Constructor with iMIX's rules for names and module types.

    Norms are group and layer norms, but not batch norms. At most one decay rule applies to a
    parameter: that of norms, else that of depthwise convolutions, else that of biases.

    Args:
      optim_wrapper_cfg: see DefaultOptimWrapperConstructor; the optimizer's
        `training_encoder_lr_multiply` has no effect, as in iMIX.
      paramwise_cfg: custom_keys, bias_lr_mult, bias_decay_mult, norm_decay_mult, dwconv_decay_mult,
        bypass_duplicate.
    """

    paramwise_keys: tuple[str, ...] = (
        "custom_keys",
        "bias_lr_mult",
        "bias_decay_mult",
        "norm_decay_mult",
        "dwconv_decay_mult",
        "bypass_duplicate",
        "strict",
    )
    optimizer_keys: ClassVar[tuple[str, ...]] = ("training_encoder_lr_multiply",)

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        self.own_settings: dict[str, Any] = {}
        if is_mapping(self.optimizer_cfg):
            cfg = dict(self.optimizer_cfg.items())
            self.own_settings = {name: cfg.pop(name) for name in self.optimizer_keys if name in cfg}
            self.optimizer_cfg = cfg  # the optimizer itself must not see iMIX's settings
        if self.own_settings.get("training_encoder_lr_multiply", 1) != 1:
            logger.warning(
                "training_encoder_lr_multiply has no effect, as in iMIX; use "
                "paramwise_cfg.custom_keys"
            )

    def typed_settings(
        self, name: str, parameter: Parameter, module: Module, is_dcn_module: bool
    ) -> dict[str, Any]:
        """Return a parameter's settings from all rules except custom_keys.

        Empty if none applies.
        """
        is_norm = _is_group_or_layer_norm(module)
        # In this order, as in iMIX: a norm's bias follows the rule of norms, even if that has no
        # multiplier.
        decays = {
            "norm_decay_mult": is_norm,
            "dwconv_decay_mult": module.is_depthwise_conv(),
            "bias_decay_mult": name == "bias",
        }
        rules = {"bias_lr_mult": name == "bias" and not is_norm, **decays}
        applying = [
            rule
            for rule, applies in rules.items()
            if applies and self.paramwise_cfg.get(rule) is not None
        ]
        decay = next((rule for rule, applies in decays.items() if applies), None)
        return self.apply_rules(parameter.path, applying, decay if decay in applying else None)


class _NamePatternConstructor(DefaultOptimizerConstructor):
    """Base class for constructors that set the learning rate and decay of every parameter by
    name.
    """

    no_decay: ClassVar[tuple[str, ...]] = _NO_DECAY
    optional: ClassVar[tuple[str, ...]] = ()  # of `paramwise_keys`
    language_weights: frozenset[str] | None = None

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        for name in self.paramwise_keys:
            if name not in self.paramwise_cfg and name not in self.optional:
                raise ConfigError(
                    f"`paramwise_cfg` of {type(self).__name__} must have {name}, got "
                    f"{sorted(self.paramwise_cfg)}"
                )
        self._prepare()

    def _prepare(self) -> None:
        """Check and read the settings."""

    def __call__(self, model: ParamsSource, module_types: Mapping[str, str] | None = None) -> Any:
        params, _ = self.get_params(model, module_types)
        self.read_optimizer()
        self.require_base_lr(type(self).__name__)
        # With the module beside each parameter: what is exempt from decay depends on its class as
        # well.
        members = [
            (p, module) for module in self.module_tree().walk() for p in module.parameters.values()
        ]
        self._check_names([parameter.path for parameter, _ in members])
        groups = [
            {
                "params": [p],
                **self.base_settings(p.path),
                **self._group_settings(p.path, self._is_exempt(p, module)),
            }
            for p, module in members
        ]
        return self.wrap(params, self._sort_groups(merge_equal(groups)))

    def _group_settings(self, path: str, exempt: bool) -> dict[str, Any]:
        """Return lr, weight_decay and the patterns that matched, for a parameter that may be
        exempt from decay.
        """
        raise NotImplementedError

    def _read_language_weights(self) -> None:
        file = self.paramwise_cfg["language_weights_file"]
        names = decode(read_bytes(pathlib.Path(file).expanduser()))
        if not isinstance(names, list | dict) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                "`paramwise_cfg.language_weights_file` must hold a JSON list of names, got "
                f"{os.fspath(file)!r}"
            )
        self.language_weights = frozenset(names)

    def _is_language(self, path: str) -> bool:
        """Return whether a parameter is a language weight, by its PyTorch name inside any outer
        module.
        """
        parts = paths.torch_alias(path).split(".")
        return any(
            ".".join(parts[start:]) in (self.language_weights or ()) for start in range(len(parts))
        )

    def _check_names(self, names: list[str]) -> None:
        if self.language_weights is not None and not any(map(self._is_language, names)):
            listed = next(iter(sorted(self.language_weights)), "nothing")
            expected = next(iter(names), "none")
            raise ConfigError(
                "`paramwise_cfg.language_weights_file` must list parameters of the model such as "
                f"{expected!r}, got {os.fspath(self.paramwise_cfg['language_weights_file'])!r} "
                f"with {listed!r}, ..."
            )

    def _sort_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return groups

    def _is_exempt(self, parameter: Parameter, module: Module) -> bool:
        """Return whether a parameter matches `no_decay`."""
        names = [paths.torch_alias(re.sub(r"LayerNorm_\d+", "LayerNorm", parameter.path))]
        if kind_of(module.type).startswith("LayerNorm"):
            # a LayerNorm by class, under another name
            names.append(f"LayerNorm.{names[0].rpartition('.')[2]}")
        return any(part in name for part in self.no_decay for name in names)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class BertOptimizerConstructor(_NamePatternConstructor):
    """Constructor with `lr` for language weights and `image_lr` for others.

    Decay 0.01, 0 for biases and LayerNorms.

    Args:
      optim_wrapper_cfg: see DefaultOptimWrapperConstructor; the optimizer also has `image_lr`.
      paramwise_cfg: `language_weights_file`, a JSON list with the language weights' PyTorch names.
    """

    paramwise_keys: tuple[str, ...] = ("language_weights_file",)
    optimizer_keys: ClassVar[tuple[str, ...]] = ("training_encoder_lr_multiply", "image_lr")

    def _prepare(self) -> None:
        if "image_lr" not in self.own_settings:
            raise ConfigError(
                "`optimizer.image_lr` must be given, the learning rate of all but the language "
                "weights, got none"
            )
        check_value("optimizer.image_lr", "lr", self.own_settings["image_lr"], 1.0)
        _warn_of_fixed_decay(self.base_wd)
        self._read_language_weights()

    def _group_settings(self, path: str, exempt: bool) -> dict[str, Any]:
        is_language = self._is_language(path)
        return {
            "lr": self.base_lr if is_language else self.own_settings["image_lr"],
            "weight_decay": 0.0 if exempt else _WEIGHT_DECAY,
            "patterns": ("language weights" if is_language else "image_lr",),
        }


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class VilbertOptimizerConstructor(_NamePatternConstructor):
    """Constructor with 1e-4 for the heads and `lr` for the rest.

    Decay 0.01, 0 for biases and LayerNorms.

    With `vision_scratch`, only language weights have `lr` and all others 1e-4.

    Args:
      paramwise_cfg: `vision_scratch`, whether the vision stream is trained from scratch;
        `language_weights_file`, a JSON list with the language weights' PyTorch names, which is read
        if `vision_scratch` is True.
    """

    paramwise_keys: tuple[str, ...] = ("language_weights_file", "vision_scratch")
    head: ClassVar[str] = "vil_"

    def _prepare(self) -> None:
        check_value("paramwise_cfg.vision_scratch", "", self.paramwise_cfg["vision_scratch"], True)
        _warn_of_fixed_decay(self.base_wd)
        if self.paramwise_cfg["vision_scratch"]:
            self._read_language_weights()

    def _group_settings(self, path: str, exempt: bool) -> dict[str, Any]:
        if self.head in path:
            # The order matters: a head inside the language part is trained from scratch too.
            lr = _FROM_SCRATCH_LR
            pattern = self.head
        elif self.language_weights is None or self._is_language(path):
            lr = self.base_lr
            pattern = "pre-trained"
        else:
            lr = _FROM_SCRATCH_LR
            pattern = "vision_scratch"
        return {"lr": lr, "weight_decay": 0.0 if exempt else _WEIGHT_DECAY, "patterns": (pattern,)}


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DevlbertOptimizerConstructor(VilbertOptimizerConstructor):
    """VilbertOptimizerConstructor with `vil_prediction` as the only head.

    Args:
      paramwise_cfg: see VilbertOptimizerConstructor; `strict_upstream=True` decays only biases and
        LayerNorms, as in iMIX.
    """

    paramwise_keys: tuple[str, ...] = ("language_weights_file", "vision_scratch", "strict_upstream")
    optional = ("strict_upstream",)
    head = "vil_prediction"

    def _group_settings(self, path: str, exempt: bool) -> dict[str, Any]:
        return super()._group_settings(
            path, exempt != bool(self.paramwise_cfg.get("strict_upstream"))
        )


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class OscarOptimizerConstructor(_NamePatternConstructor):
    """Constructor with decay for everything but biases and LayerNorm scales.

    Args:
      paramwise_cfg: `weight_decay`.
    """

    paramwise_keys: tuple[str, ...] = ("weight_decay",)
    no_decay: ClassVar[tuple[str, ...]] = ("bias", "LayerNorm.weight")

    def _prepare(self) -> None:
        self.weight_decay = self.paramwise_cfg["weight_decay"]
        check_value("paramwise_cfg.weight_decay", "weight_decay", self.weight_decay, 1.0)

    def _group_settings(self, path: str, exempt: bool) -> dict[str, Any]:
        decay = 0.0 if exempt else self.weight_decay
        return {
            "lr": self.base_lr,
            "weight_decay": decay,
            "patterns": ("no decay",) if exempt else (),
        }

    def _sort_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The group with decay comes before the group without.
        return sorted(groups, key=lambda group: "no decay" in group["patterns"])


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(
    ["OscarPreTrainOptimizerConstructor", "UniterOptimizerConstructor"]
)
class OscarPreTrainOptimizerConstructor(OscarOptimizerConstructor):
    """OscarOptimizerConstructor that exempts whole LayerNorms from decay."""

    no_decay: ClassVar[tuple[str, ...]] = _NO_DECAY


UniterOptimizerConstructor = OscarPreTrainOptimizerConstructor  # iMIX has two of them


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class UniterVQAOptimizerConstructor(OscarPreTrainOptimizerConstructor):
    """UniterOptimizerConstructor with `lr_mul` times the learning rate for the head.

    Args:
      paramwise_cfg: `weight_decay`, `lr_mul` and `key_named_param`, a part of the head's parameter
        names.
    """

    paramwise_keys: tuple[str, ...] = ("weight_decay", "lr_mul", "key_named_param")

    def _prepare(self) -> None:
        super()._prepare()
        self.lr_mul = self.paramwise_cfg["lr_mul"]
        self.head = self.paramwise_cfg["key_named_param"]
        check_value("paramwise_cfg.lr_mul", "lr_mult", self.lr_mul, 1.0)
        if not isinstance(self.head, str) or not self.head:
            raise ConfigError(
                f"`paramwise_cfg.key_named_param` must be a part of a name, got {self.head!r}"
            )

    def _group_settings(self, path: str, exempt: bool) -> dict[str, Any]:
        settings = super()._group_settings(path, exempt)
        if not self._is_head(path):
            return settings
        return {
            **settings,
            "lr": self.base_lr * self.lr_mul,
            "patterns": (self.head, *settings["patterns"]),
        }

    def _check_names(self, names: list[str]) -> None:
        if not any(map(self._is_head, names)):
            raise ConfigError(
                "`paramwise_cfg.key_named_param` must be a part of a parameter's name, got "
                f"{self.head!r}{paths.closest_paths(self.head, names)}"
            )

    def _sort_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The head's groups come before the others.
        return sorted(
            super()._sort_groups(groups), key=lambda group: self.head not in group["patterns"]
        )

    def _is_head(self, path: str) -> bool:
        return any(self.head in alias for alias in paths.path_aliases(path))


def _is_group_or_layer_norm(module: Module) -> bool:
    if module.type is not None:
        return kind_of(module.type).startswith(("GroupNorm", "LayerNorm"))
    name = module.path.rpartition(".")[2].lower()
    return (
        module.is_norm()
        and "batchnorm" not in name
        and not re.search(r"(?<![a-z])bn(?![a-z])", name)
    )


def _warn_of_fixed_decay(weight_decay: float | None) -> None:
    if weight_decay not in (None, _WEIGHT_DECAY):
        logger.warning(
            "weight_decay=%s has no effect: the constructor uses %s", weight_decay, _WEIGHT_DECAY
        )
