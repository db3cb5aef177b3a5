"""Builds an optimizer wrapper from a config and its parameter-wise rules, `paramwise_cfg`."""

import logging
from collections.abc import Mapping
from typing import Any

from jengine import paths
from jengine.errors import ConfigError, closest, config_path
from jengine.optim.modules import Module, Parameter, module_tree
from jengine.optim.optimizers.optax_named import from_optax
from jengine.optim.param_group import did_you_mean
from jengine.optim.wrapper import OptimWrapper
from jengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS

logger = logging.getLogger("jengine")

# what PyTorch asks of its kernels; a config that carries them over means the same numbers without them
_TORCH_EXECUTION = ("foreach", "fused", "capturable", "differentiable")
_NOT_SETTINGS = ("lr_mult", "decay_mult", "requires_grad")


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(name="ForceDefaultOptimWrapperConstructor")  # MMSegmentation's name
@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Gives each parameter its learning rate and weight decay by rules over names, module types and shapes.

    To write another constructor, derive from it, override `add_params` and register the class.

    Args:
      optim_wrapper_cfg: `dict(optimizer=dict(type=, lr=, ...), ...)`, `type` optional.
      paramwise_cfg: the rules; None or {} for one group of all parameters. Keys:
        custom_keys: {part of a parameter's name: dict(lr_mult=1, decay_mult=1, requires_grad=True, any group
          setting)}. The longest matching key alone decides, no other rule applies to that parameter.
        bias_lr_mult, bias_decay_mult: biases outside norm layers (decay: also inside).
        norm_decay_mult: all parameters of batch, instance, group and layer norms.
        dwconv_decay_mult: depthwise convolutions.
        flat_decay_mult: one-dimensional parameters.
        dcn_offset_lr_mult, dcn_modules: convolutions under a `conv_offset` in a deformable convolution, found by
          its class name or by being named (in part) in the list `dcn_modules`.
        force_default_settings: True: after a custom key the other rules apply as well and win.
        bypass_duplicate: accepted; a pytree holds a shared parameter once.
        strict: True: a custom key that matches nothing is an error, not a warning.

    Attributes:
      base_lr: the optimizer's learning rate.
      base_wd: its weight decay, None if the config gives none.
      unmatched: custom keys that matched no parameter.

    Raises:
      AssertionError: no 'optimizer'. TypeError: configs that are no dicts.
    """

    paramwise_keys: tuple[str, ...] = (
        "custom_keys", "bias_lr_mult", "bias_decay_mult", "norm_decay_mult", "dwconv_decay_mult", "flat_decay_mult",
        "dcn_offset_lr_mult", "dcn_modules", "force_default_settings", "bypass_duplicate", "strict",
    )  # fmt: skip

    def __init__(self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None) -> None:
        if not hasattr(optim_wrapper_cfg, "items"):
            raise TypeError(f"an optimizer wrapper is a dict, found {type(optim_wrapper_cfg).__name__}")
        if "optimizer" not in optim_wrapper_cfg:
            raise AssertionError(f"an optimizer wrapper needs an 'optimizer', found only {sorted(optim_wrapper_cfg)}")
        self.optim_wrapper_cfg = dict(optim_wrapper_cfg)
        self.optimizer_cfg = self.optim_wrapper_cfg.pop("optimizer")
        self.paramwise_cfg = {} if paramwise_cfg is None else dict(paramwise_cfg)
        settings = self._optimizer_settings()
        self.base_lr: Any = settings.get("lr", settings.get("learning_rate"))
        self.base_wd: Any = settings.get("weight_decay")
        self.unmatched: list[str] = []
        self._used: set[str] = set()
        self._validate_cfg()

    def __call__(self, model: Any, module_types: Mapping[str, str] | None = None) -> OptimWrapper:
        """Builds the wrapper.

        Args:
          model: parameters, or an object that has them as `params` (and perhaps `module_types`).
          module_types: dotted module path -> class name.
        """
        params, types = params_of(model, module_types)
        if not self.paramwise_cfg:
            return self.wrap(params, None)
        self.fill_base_lr()
        groups: list[dict[str, Any]] = []
        self.add_params(groups, module_tree(params, types))
        self._report_unmatched(params)
        return self.wrap(params, merge_equal(groups))

    def fill_base_lr(self) -> None:
        """Takes the optimizer's default learning rate where the config gives none."""
        if self.base_lr is None:
            self.base_lr = self._build_optimizer().defaults["lr"]

    def wrap(self, params: Any, groups: list[dict[str, Any]] | None) -> OptimWrapper:
        """The wrapper of the config on the given groups; None for one group of all parameters."""
        optimizer = self._build_optimizer()
        if groups is not None:
            optimizer = optimizer.with_groups(groups)
        wrapper = OPTIM_WRAPPERS.build({"type": "OptimWrapper", **self.optim_wrapper_cfg}, optimizer=optimizer)
        wrapper.grouped.unmatched = self.unmatched
        wrapper.grouped.bind(params)
        return wrapper

    def add_params(
        self, params: list[dict[str, Any]], module: Module, prefix: str = "", is_dcn_module: bool = False
    ) -> None:
        """Appends the settings of every parameter of `module` and below.

        Args:
          params: list of dicts with `params`, the parameters concerned, and any settings that are not the
            optimizer's own.
          module: where to look.
          prefix: its dotted path.
          is_dcn_module: whether its parent is a deformable convolution.
        """
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            settings = self._settings(name, parameter, module, is_dcn_module)
            if not settings.get("requires_grad", True):
                logger.warning("%s does not require gradients: it is left out of the parameter groups", full_name)
                continue
            for key, value in settings.items():
                if key != "patterns":
                    logger.info("paramwise_options -- %s:%s=%s", full_name, key, value)
            # settings left out are the optimizer's, so that equal groups are recognised
            lr = {} if self.base_lr is None else {"lr": self.base_lr}
            weight_decay = {} if self.base_wd is None else {"weight_decay": self.base_wd}
            params.append({"params": [parameter], **lr, **weight_decay, **settings})
        below_dcn = module.is_deformable_conv() or any(
            key in spelling for key in self.paramwise_cfg.get("dcn_modules", ()) for spelling in paths.spellings(prefix)
        )
        for name, child in module.named_children():
            self.add_params(params, child, f"{prefix}.{name}" if prefix else name, below_dcn)

    # ------------------------------------------------------------------ rules

    def _settings(self, name: str, parameter: Parameter, module: Module, is_dcn_module: bool) -> dict[str, Any]:
        custom = self._custom_settings(parameter.path)
        if custom and not self.paramwise_cfg.get("force_default_settings"):
            return custom
        typed = self._typed_settings(name, parameter, module, is_dcn_module)
        return {**custom, **typed, "patterns": (*custom.get("patterns", ()), *typed.get("patterns", ()))}

    def _custom_settings(self, path: str) -> dict[str, Any]:
        custom_keys = self.paramwise_cfg.get("custom_keys", {})
        for key in sorted(sorted(custom_keys), key=len, reverse=True):
            if any(key in spelling for spelling in paths.spellings(path)):
                self._used.add(key)
                rule = dict(custom_keys[key])
                settings: dict[str, Any] = {"lr": self.base_lr * rule.get("lr_mult", 1.0)}
                if self.base_wd is not None:
                    settings["weight_decay"] = self.base_wd * rule.get("decay_mult", 1.0)
                return {**settings, **rule, "patterns": (key,)}
        return {}

    def _typed_settings(self, name: str, parameter: Parameter, module: Module, is_dcn_module: bool) -> dict[str, Any]:
        cfg = self.paramwise_cfg
        is_bias = name == "bias"
        settings: dict[str, Any] = {}
        patterns: list[str] = []
        if is_bias and not module.is_norm() and not is_dcn_module and cfg.get("bias_lr_mult") is not None:
            settings["lr"] = self.base_lr * cfg["bias_lr_mult"]
            patterns.append("bias_lr_mult")
        in_offset = is_dcn_module and "conv_offset" in module.path and module.is_conv()
        if in_offset and cfg.get("dcn_offset_lr_mult") is not None:
            settings["lr"] = self.base_lr * cfg["dcn_offset_lr_mult"]
            patterns = ["dcn_offset_lr_mult"]
        if self.base_wd is not None:
            rules = {
                "norm_decay_mult": module.is_norm(),
                "bias_decay_mult": is_bias and not is_dcn_module,
                "dwconv_decay_mult": module.is_depthwise_conv(),
                "flat_decay_mult": parameter.ndim == 1 and not is_dcn_module,
            }
            for key, applies in rules.items():
                if applies and cfg.get(key) is not None:
                    settings["weight_decay"] = self.base_wd * cfg[key]
                    patterns.append(key)
                    break
        return {**settings, "patterns": tuple(patterns)} if settings else {}

    # ------------------------------------------------------------------ config

    def _optimizer_settings(self) -> Mapping[str, Any]:
        if hasattr(self.optimizer_cfg, "items"):
            return self.optimizer_cfg
        return getattr(self.optimizer_cfg, "defaults", {})

    def _build_optimizer(self) -> Any:
        cfg = self.optimizer_cfg
        if hasattr(cfg, "items"):
            with config_path("optimizer"):
                return OPTIMIZERS.build({k: v for k, v in cfg.items() if k not in _TORCH_EXECUTION})
        if hasattr(cfg, "defaults"):
            return cfg
        if hasattr(cfg, "update") and hasattr(cfg, "init"):
            return from_optax(cfg)
        with config_path("optimizer"):
            return OPTIMIZERS.build(cfg)

    def _validate_cfg(self) -> None:
        cfg = self.paramwise_cfg
        custom_keys = cfg.get("custom_keys", {})
        if not hasattr(custom_keys, "items"):
            raise TypeError(f"custom_keys must be a dict, found {type(custom_keys).__name__}: {custom_keys!r}")
        own_rules = type(self).add_params is not DefaultOptimWrapperConstructor.add_params
        if self.paramwise_keys and not own_rules:
            for key in cfg:
                if key in ("lr_mult", "decay_mult"):
                    logger.warning("paramwise_cfg: %s has an effect only inside an entry of custom_keys", key)
                elif key not in self.paramwise_keys:
                    raise ConfigError(f"paramwise_cfg has no {key!r}{closest(str(key), self.paramwise_keys)}")
        decays = [k for k in ("bias_decay_mult", "norm_decay_mult", "dwconv_decay_mult") if cfg.get(k) is not None]
        decays += [f"custom_keys[{k!r}].decay_mult" for k, rule in custom_keys.items() if "decay_mult" in rule]
        if decays and self.base_wd is None:
            raise ValueError(f"base_wd should not be None: {decays[0]} needs a weight_decay in the optimizer's config")

    def _report_unmatched(self, params: Any) -> None:
        leaves = paths.flatten(params)
        names = {spelling for path in leaves for spelling in paths.spellings(path)}
        for key in self.paramwise_cfg.get("custom_keys", {}):
            if key not in self._used and not any(key in name for name in names):
                text = f"custom_keys: {key!r} matches no parameter{did_you_mean(key, leaves)}"
                if self.paramwise_cfg.get("strict"):
                    raise ConfigError(text)
                logger.warning(text)
                self.unmatched.append(key)


def params_of(model: Any, module_types: Mapping[str, str] | None) -> tuple[Any, Mapping[str, str]]:
    """The parameters and module types of what a constructor is called with.

    Args:
      model: parameters, or an object that has them as `params` (and perhaps `module_types`).
      module_types: wins over those of the model.
    """
    params = model.params if hasattr(model, "params") else model
    return params, module_types or getattr(model, "module_types", None) or {}


def merge_equal(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins groups whose settings are equal, in the order of their first appearance.

    Args:
      groups: dicts of settings with `params`, a list of Parameters or paths; multipliers in them are dropped.
    """
    merged: dict[str, dict[str, Any]] = {}
    for group in groups:
        own = {k: v for k, v in group.items() if k not in ("params", "patterns", *_NOT_SETTINGS)}
        members = [p if isinstance(p, str) else p.path for p in group["params"]]
        entry = merged.setdefault(repr(sorted(own.items())), {"params": [], "patterns": [], **own})
        entry["params"] += members
        entry["patterns"] += [p for p in group.get("patterns", ()) if p not in entry["patterns"]]
    return list(merged.values())
