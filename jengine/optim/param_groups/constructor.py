"""Constructor of optimizer wrappers, with the parameter-wise rules in `paramwise_cfg`."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jengine.config import paths
from jengine.config.annotations import is_mapping
from jengine.config.errors import ArgumentError, ConfigError, closest
from jengine.config.plugins import load_provided, provided
from jengine.config.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, as_config
from jengine.model.model import Model
from jengine.model.module_types import has_equinox_modules
from jengine.model.roles import Roles, parameter_roles, roles_by_name
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.optimizers.optimizer_builder import build_optimizer
from jengine.optim.param_groups.modules import (
    Module,
    Parameter,
    ParamsSource,
    get_params,
    is_norm_by_role,
    module_tree,
)
from jengine.optim.param_groups.paramwise_cfg import (
    FIELDS,
    check_custom_fields,
    check_value,
    parse_custom_keys,
)
from jengine.optim.wrapper import OptimWrapper

logger = logging.getLogger("jengine")

DECAY_RULES = ("bias_decay_mult", "norm_decay_mult", "dwconv_decay_mult", "flat_decay_mult")
_LR_RULES = ("bias_lr_mult", "dcn_offset_lr_mult")
_RULES = (*DECAY_RULES, *_LR_RULES)
_SWITCHES = ("force_default_settings", "bypass_duplicate", "strict", "strict_upstream")


# MMSegmentation's name
@OPTIM_WRAPPER_CONSTRUCTORS.register_module(name="ForceDefaultOptimWrapperConstructor")
@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Constructor with a learning rate and weight decay for each parameter, by rules over names,
    modules and shapes.

    To write another constructor, derive from this class, override `add_params` and register the
    class.

    >>> import jax.numpy as jnp
    >>> cfg, rules = dict(optimizer=dict(type="AdamW", weight_decay=0.1)), dict(bias_decay_mult=0.0)
    >>> params = {"head": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
    >>> settings = DefaultOptimWrapperConstructor(cfg, rules)(params).param_settings
    >>> {path: group["weight_decay"] for path, group in settings.items()}
    {'head.bias': 0.0, 'head.kernel': 0.1}

    Args:
      optim_wrapper_cfg: `dict(optimizer=dict(type=, lr=, ...), ...)`, `type` optional.
      paramwise_cfg: the rules; None or {} for one group of all parameters. Keys:
        custom_keys: {part of a parameter's name: dict(lr_mult=1, decay_mult=1, requires_grad=True,
          any group setting, fix_lr, lars_exclude)}, or a list of such pairs. Only the longest
          matching key is used, and no other rule applies to that parameter.
        bias_lr_mult, bias_decay_mult: biases outside norm layers (decay: also inside).
        norm_decay_mult: all parameters in batch, instance, group and layer norms.
        dwconv_decay_mult: depthwise convolutions.
        flat_decay_mult: one-dimensional parameters, and by role biases and norms of any shape.
        roles: roles of parameters that are told wrongly or not at all, by path with wildcards:
          `{'blocks.*.qkv.kernel': dict(role='hidden', fan_in=(0,), fan_out=(1,), parts=3)}`; see
          `jengine.model.parameter_roles`.
        dcn_offset_lr_mult, dcn_modules: convolutions under a `conv_offset` in a deformable
          convolution, which is recognised by the class name or by a match in the list
          `dcn_modules`.
        force_default_settings: True: the other rules also apply where a custom key matches, and
          take precedence.
        parametrization, base, branches: 'mup' or 'complete-p', for which rates, decays and initial
          parameters are those of a smaller model; see `jengine.extras.optimizers.parametrizations`.
        bypass_duplicate: ignored, because a pytree has a shared parameter only once.
        strict: True: a custom key that matches no parameter is an error, not a warning.

    Attributes:
      base_lr: the optimizer's learning rate.
      base_wd: the optimizer's weight decay; None if it is not in the config, and 0 by default.
      matched, unmatched: custom keys and rules that matched a parameter, and those that did not.
      custom_fields: additional legal fields in custom keys, for derived classes.

    Raises:
      ArgumentError: no 'optimizer'. TypeError: a config that is not a dict. ConfigError: an unknown
        rule or field, or an illegal value.
    """

    paramwise_keys: tuple[str, ...] = (
        "custom_keys",
        "bias_lr_mult",
        "bias_decay_mult",
        "norm_decay_mult",
        "dwconv_decay_mult",
        "flat_decay_mult",
        "dcn_offset_lr_mult",
        "dcn_modules",
        "force_default_settings",
        "bypass_duplicate",
        "strict",
        "roles",
        "parametrization",
        "base",
        "branches",
    )
    custom_fields: tuple[str, ...] = ()
    # returns the roles of the model's parameters, given those in `paramwise_cfg`
    find_roles: Callable[..., Roles] | None = None
    # returns the base model of a parametrization, given `paramwise_cfg['base']`
    find_base: Callable[[Any], Any] | None = None

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        if "optimizer" not in optim_wrapper_cfg:
            raise ArgumentError(
                f"an optimizer wrapper must have an 'optimizer', got {sorted(optim_wrapper_cfg)}"
            )
        self.optim_wrapper_cfg = dict(optim_wrapper_cfg)
        # What is left are the arguments of the wrapper itself.
        self.optimizer_cfg = as_config(self.optim_wrapper_cfg.pop("optimizer"))
        self.paramwise_cfg = {} if paramwise_cfg is None else dict(paramwise_cfg)
        settings = self.optimizer_cfg  # as written: defaults are read when parameters are known
        if not is_mapping(settings):
            settings = settings.defaults if isinstance(settings, Optimizer) else {}
        self.base_lr: Any = settings.get("lr", settings.get("learning_rate"))
        self.base_wd: Any = settings.get("weight_decay")
        self.unmatched: list[str] = []
        self.matched: set[str] = set()
        self._given: tuple[Any, Mapping[str, str]] = {}, {}
        self._roles: Roles | None = None
        self._validate_cfg()

    def __call__(
        self, model: ParamsSource, module_types: Mapping[str, str] | None = None
    ) -> OptimWrapper:
        """Build the wrapper.

        The arguments are those of `get_params`, without rules also a `Model` before `init`.
        """
        # Without rules the parameters are not needed, and a model that is not initialized yet has
        # none.
        if not self.paramwise_cfg and isinstance(model, Model) and not hasattr(model, "params"):
            return self.wrap(None, None)
        params, types = self.get_params(model, module_types)
        if not self.paramwise_cfg.keys() - {"roles"} and self.optimizer.kinds is None:
            wrapper = self.wrap(params, None)
            # `params` lacks what the modules do not train, and the trees of the caller need not
            if has_equinox_modules(model):
                wrapper.grouped.restrict(params)
            return wrapper
        self.read_optimizer()
        groups: list[dict[str, Any]] = []
        self.add_params(groups, self.module_tree())
        if not groups:
            raise ConfigError(
                "`paramwise_cfg` must leave a parameter to train, got requires_grad=False for all "
                "of them"
            )
        # After all parameters have been walked: a rule is without effect only if none of them
        # matched it.
        self.report_unmatched(params, types, () if self._overrides_rules() else _RULES)
        rescale = None
        if self.paramwise_cfg.get("parametrization") is not None:
            groups, rescale = load_provided("optimizer_parts", "parametrize")(
                groups, self.paramwise_cfg, self.optimizer, params, self.get_roles(), self.find_base
            )
        # With a group per parameter, the step's inputs and compile time would grow with the model.
        wrapper = self.wrap(params, merge_equal(groups))
        wrapper.rescale = rescale
        return wrapper

    def get_params(
        self, model: ParamsSource, module_types: Mapping[str, str] | None
    ) -> tuple[Any, Mapping[str, str]]:
        """Return the parameters and module types, see `get_params`, and note them for the roles."""
        params, types = get_params(model, module_types)
        self._given = params, types
        if "roles" in self.paramwise_cfg:
            self.get_roles()  # a key that matches nothing is an error
        return params, types

    def get_roles(self) -> Roles:
        """Return the parameters' roles, found when they are asked for: the loss is traced."""
        if self._roles is None:
            overrides = self.paramwise_cfg.get("roles") or {}
            params, types = self._given
            self._roles = (
                parameter_roles(None, params, overrides, module_types=types)
                if self.find_roles is None
                else self.find_roles(overrides)
            )
        return self._roles

    def module_tree(self) -> Module:
        """Return the tree of the modules, for rules; see `module_tree`."""
        params, types = self._given
        by_name = functools.partial(roles_by_name, params, types, self.paramwise_cfg.get("roles"))
        return module_tree(params, types, by_name if self.find_roles is None else self.get_roles)

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer with default settings."""
        return build_optimizer(self.optimizer_cfg)

    def build_without_params(self) -> dict[str, OptimWrapper]:
        """Return the wrapper by the name '', after the checks of the rules that need no
        parameters.
        """
        if self.paramwise_cfg:
            self.read_optimizer()
        return {"": self.wrap(None, None)}

    def read_optimizer(self) -> None:
        """Use the optimizer's default learning rate and decay if the config has none, and check the
        custom keys.

        Raises:
          ConfigError: a custom key with a field that the optimizer's groups do not have, or an
            illegal value; or a multiplier for an optimizer without a learning rate. ValueError: a
            decay multiplier without a weight decay.
        """
        self.read_defaults()
        rules = {key: self.paramwise_cfg.get(key) for key in (*DECAY_RULES, *_LR_RULES)}
        custom_keys = self.paramwise_cfg.get("custom_keys", {})
        for key, rule in custom_keys.items():
            rules |= {f"custom_keys[{key!r}].{name}": value for name, value in rule.items()}
        for name, value in rules.items():
            if value is not None and name.endswith("lr_mult"):
                self.require_base_lr(name)
            # flat_decay_mult=0.0 may be for an optimizer that has none
            is_decay = name.endswith("decay_mult") and name != "flat_decay_mult"
            if value is not None and is_decay and self.base_wd is None:
                raise ValueError(f"`optimizer.weight_decay` must be set for {name}, got none")
        if not self._overrides_rules():
            check_custom_fields(
                custom_keys, self.optimizer.name, self.optimizer.defaults, self.custom_fields
            )

    def read_defaults(self) -> None:
        """Use the optimizer's default learning rate and decay, which multipliers need, if the
        config has none.
        """
        defaults = self.optimizer.defaults
        if self.base_lr is None:
            self.base_lr = defaults.get("lr")
        if self.base_wd is None:
            self.base_wd = defaults.get("weight_decay") or None  # 0 leaves nothing to multiply

    def require_base_lr(self, rule: str) -> None:
        """Raise a ConfigError if the optimizer has no learning rate for `rule` to multiply."""
        if self.base_lr is None:
            raise ConfigError(f"`optimizer.lr` must be a number, which {rule} multiplies, got none")

    def wrap(self, params: Any | None, groups: list[dict[str, Any]] | None) -> OptimWrapper:
        """Return the configured wrapper.

        `params` is None if they are unknown until `wrapper.init(params)`, `groups` for one group
        with all parameters.
        """
        # `with_groups` returns a copy: the cached optimizer stays without groups.
        optimizer = self.optimizer if groups is None else self.optimizer.with_groups(groups)
        wrapper = OPTIM_WRAPPERS.build(
            {"type": "OptimWrapper", **self.optim_wrapper_cfg}, optimizer=optimizer
        )
        wrapper.grouped.unmatched = self.unmatched  # for the group table
        if params is not None:
            if optimizer.by_layer:
                leaves = self.module_tree().named_parameters()
                wrapper.grouped.stacked = {leaf.path: leaf.stacked for _, leaf in leaves}
            wrapper.grouped.bind(params)
            is_optax = optimizer.defaults.get("muon_weight_dimension_numbers", ...) is None
            if is_optax and "warn_of_muon" in provided("optimizer_parts"):
                load_provided("optimizer_parts", "warn_of_muon")(params, self.get_roles())
            # without the arrays, which would live as long as the wrapper
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
            self._given = shapes, self._given[1]
            wrapper.grouped.find_roles = self.get_roles
        return wrapper

    def add_params(
        self,
        params: list[dict[str, Any]],
        module: Module,
        prefix: str = "",
        is_dcn_module: bool = False,
    ) -> None:
        """Append the settings for every parameter in `module` and below it.

        Args:
          params: list of dicts with `params`, a list of parameters, and settings that differ from
            the optimizer's defaults.
          module: the module.
          prefix: dotted module path.
          is_dcn_module: whether the parent module is a deformable convolution.
        """
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            settings = self._settings(name, parameter, module, is_dcn_module)
            if not settings.get("requires_grad", True):
                logger.debug(
                    "%s does not require gradients and is in no parameter group", full_name
                )
                continue
            for key, value in settings.items():
                if key != "patterns":  # in the log file, as MMEngine; the terminal has the groups
                    line = f"paramwise_options -- {full_name}:{key}={value}"
                    logger.info(line, extra={"on_terminal": ""})
            # add the optimizer's values for missing settings, so that equal groups can be merged
            params.append({"params": [parameter], **self.base_settings(parameter.path), **settings})
        is_dcn = module.is_deformable_conv() or _matches(
            self.paramwise_cfg.get("dcn_modules", ()), prefix
        )
        for name, child in module.named_children():
            self.add_params(params, child, f"{prefix}.{name}" if prefix else name, is_dcn)

    # -------------------- rules

    def base_settings(self, path: str) -> dict[str, Any]:
        """Return the parameter's `lr` and `weight_decay` without rules, as far as the optimizer has
        them.
        """
        role = None if self.optimizer.kinds is None else self.get_roles()[path]
        base = {"lr": self.base_lr, "weight_decay": self.base_wd}
        known = {name: value for name, value in base.items() if value is not None}
        return {**known, **self.optimizer.settings_of(role)}

    def custom_settings(self, path: str) -> dict[str, Any]:
        """Return the settings from the longest custom key that matches a parameter.

        Empty if none matches.
        """
        custom_keys = self.paramwise_cfg.get("custom_keys", {})
        # as MMEngine: the longest first, then by name
        for key in sorted(sorted(custom_keys), key=len, reverse=True):
            if any(key in alias for alias in paths.path_aliases(path)):
                self.matched.add(key)
                rule = dict(custom_keys[key])
                if not rule.get("requires_grad", True):
                    return {**rule, "patterns": (key,)}
                settings = self.base_settings(path)
                if "lr" in settings:
                    settings["lr"] *= rule.get("lr_mult", 1.0)
                if "weight_decay" in settings:
                    settings["weight_decay"] *= rule.get("decay_mult", 1.0)
                return {**settings, **rule, "patterns": (key,)}
        return {}

    def typed_settings(
        self, name: str, parameter: Parameter, module: Module, is_dcn_module: bool
    ) -> dict[str, Any]:
        """Return a parameter's settings from all other rules; empty if none applies.

        Args:
          name: parameter name in `module`.
          parameter: the parameter.
          module: the module that has it.
          is_dcn_module: whether the parent module is a deformable convolution.
        """
        # Names of Flax, which torch shares here; Haiku's `b` is no bias for these rules.
        is_bias = name == "bias"

        def is_norm() -> bool:
            return module.is_norm() or (module.type is None and is_norm_by_role(parameter))

        # The order matters: MMEngine asks in this order, and the first decay that applies is used.
        rules = {
            "bias_lr_mult": lambda: is_bias and not is_dcn_module and not is_norm(),
            "dcn_offset_lr_mult": lambda: (
                is_dcn_module and "conv_offset" in module.path and module.is_conv()
            ),
            "norm_decay_mult": is_norm,
            "bias_decay_mult": lambda: is_bias and not is_dcn_module,
            "dwconv_decay_mult": module.is_depthwise_conv,
            "flat_decay_mult": lambda: parameter.is_flat and not is_dcn_module,
        }
        applying = [
            key
            for key, applies in rules.items()
            if self.paramwise_cfg.get(key) is not None and applies()
        ]
        # in the order of the rules above
        decay = next((key for key in applying if key.endswith("decay_mult")), None)
        return self.apply_rules(parameter.path, applying, decay)

    def apply_rules(self, path: str, applying: Sequence[str], decay: str | None) -> dict[str, Any]:
        """Return the settings from the rules that apply to a parameter, of whose decay
        multipliers `decay` is used.
        """
        self.matched.update(applying)
        base = self.base_settings(path)
        settings: dict[str, Any] = {}
        patterns: list[str] = []
        for key in _LR_RULES:
            if key in applying:
                settings["lr"] = base["lr"] * self.paramwise_cfg[key]
                patterns = [key]
        if decay is not None and "weight_decay" in base:
            settings["weight_decay"] = base["weight_decay"] * self.paramwise_cfg[decay]
            patterns.append(decay)
        return {**settings, "patterns": tuple(patterns)} if settings else {}

    def _settings(
        self, name: str, parameter: Parameter, module: Module, is_dcn_module: bool
    ) -> dict[str, Any]:
        custom = self.custom_settings(parameter.path)
        typed = self.typed_settings(name, parameter, module, is_dcn_module)
        if custom and not self.paramwise_cfg.get("force_default_settings"):
            return custom
        return {
            **custom,
            **typed,
            "patterns": (*custom.get("patterns", ()), *typed.get("patterns", ())),
        }

    # -------------------- config

    def _overrides_rules(self) -> bool:
        # A subclass with its own rules reads its own keys, so that none can be called unknown here.
        return type(self).add_params is not DefaultOptimWrapperConstructor.add_params

    def _validate_cfg(self) -> None:
        cfg = self.paramwise_cfg
        if self.paramwise_keys and not self._overrides_rules():
            for key, value in cfg.items():
                path = f"paramwise_cfg.{key}"
                if key in ("lr_mult", "decay_mult"):
                    logger.warning(
                        "paramwise_cfg: %s has an effect only inside an entry of custom_keys", key
                    )
                elif key not in self.paramwise_keys:
                    raise ConfigError(
                        f"paramwise_cfg has no {key!r}{closest(str(key), self.paramwise_keys)}"
                    )
                elif key in ("base", "branches") and cfg.get("parametrization") is None:
                    raise ConfigError(
                        f"`paramwise_cfg.parametrization` must be set with {key!r}, got none"
                    )
                # None switches a rule off, which a config that inherits from another one needs
                elif key.endswith("_mult") and value is not None:
                    check_value(path, "lr_mult", value, 1.0)
                elif key in _SWITCHES:
                    check_value(path, key, value, True)
                elif key == "dcn_modules" and not (
                    isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
                ):
                    raise ConfigError(f"`{path}` must be a list of module names, got {value!r}")
        if "custom_keys" in cfg:
            cfg["custom_keys"] = parse_custom_keys(cfg["custom_keys"])

    def report_unmatched(
        self, params: Any, types: Mapping[str, str], rules: Sequence[str] = _RULES
    ) -> None:
        """Warn of custom keys and applied `rules` that match no parameter.

        With `strict` raise a ConfigError.
        """
        if self.paramwise_cfg.get("norm_decay_mult") is not None and "norm_decay_mult" in rules:
            keys = self.paramwise_cfg.get("custom_keys", {})
            for module in self.module_tree().walk():
                is_other = "norm" in (module.type or "").lower() and not module.is_norm()
                if is_other and any(not _matches(keys, p.path) for p in module.parameters.values()):
                    logger.warning(
                        f"`paramwise_cfg.norm_decay_mult` does not apply to {module.type} "
                        f"({module.path}): name it in custom_keys"
                    )
        # A key may match only parameters for which a longer key was used; it is no typo.
        names = {alias for path in paths.flatten(params) for alias in paths.path_aliases(path)}
        unmatched = [
            key
            for key in self.paramwise_cfg.get("custom_keys", {})
            if key not in self.matched and not any(key in name for name in names)
        ]
        for key in rules:
            if self.paramwise_cfg.get(key) is not None and key not in self.matched:
                unmatched.append(key)
        untyped = "" if types else "; without `module_types` names and shapes tell modules' kinds"
        for key in unmatched:
            hint = untyped if key in rules else paths.closest_paths(key, paths.flatten(params))
            text = f"`paramwise_cfg`: {key!r} matches no parameter{hint}"
            if self.paramwise_cfg.get("strict"):
                raise ConfigError(text)
            logger.warning(text)
        self.unmatched += unmatched


def _matches(keys: Iterable[str], path: str) -> bool:
    return any(key in alias for key in keys for alias in paths.path_aliases(path))


def merge_equal(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge groups with equal settings, in order of first appearance.

    >>> merge_equal([{"params": [name], "lr": 0.1} for name in ("kernel", "bias")])
    [{'params': ['kernel', 'bias'], 'patterns': [], 'lr': 0.1}]

    Args:
      groups: dicts of settings with `params`, a list of Parameters or paths, and optionally
        `patterns`, the rules that define the group; multipliers are dropped.
    """
    merged: dict[str, dict[str, Any]] = {}
    for group in groups:
        settings = {k: v for k, v in group.items() if k not in ("params", "patterns", *FIELDS)}
        members = [p if isinstance(p, str) else p.path for p in group["params"]]
        # By repr, as settings may be lists, which cannot be hashed.
        identity = repr(sorted(settings.items()))
        new = merged.setdefault(identity, {"params": [], "patterns": [], **settings})
        new["params"] += members
        new["patterns"] += [p for p in group.get("patterns", ()) if p not in new["patterns"]]
    return list(merged.values())
