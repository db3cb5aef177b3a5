"""Build an optimizer wrapper from the `optim_wrapper` of a config."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jengine.config.containers import resolve
from jengine.config.errors import config_path
from jengine.config.registry import OPTIM_WRAPPER_CONSTRUCTORS
from jengine.model.roles import Roles
from jengine.optim.optimizers.optimizer_builder import is_optimizer
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict, wrappers_by_name

# from `paramwise_cfg['roles']` and optionally `phases`
RolesFinder: TypeAlias = Callable[..., Roles]
# from `paramwise_cfg['base']`
BaseFinder: TypeAlias = Callable[[Any], Any]


def build_optim_wrapper(
    params_or_model: Any,
    cfg: Mapping[str, Any],
    *,
    module_types: Mapping[str, str] | None = None,
    roles: RolesFinder | None = None,
    base: BaseFinder | None = None,
) -> Any:
    """Build an optimizer wrapper.

    >>> import jax.numpy as jnp
    >>> params = {"backbone": {"kernel": jnp.ones((3, 2))}, "head": {"kernel": jnp.ones((2, 2))}}
    >>> rules = dict(custom_keys=dict(head=dict(lr_mult=10.0)))
    >>> wrapper = build_optim_wrapper(
    ...     params, dict(optimizer=dict(type="SGD", lr=0.5), paramwise_cfg=rules)
    ... )
    >>> wrapper.get_lr()
    {'base_lr': [0.5], 'lr': [0.5, 5.0]}

    Args:
      params_or_model: a pytree of arrays or ShapeDtypeStructs; an `nnx.State` or `nnx.Module`,
        whose `nnx.Param`s are trained (a module also has types); or an object with parameters as
        `params` (and optionally `module_types`). The wrapper takes trees with the same paths: the
        parameters, for a module `nnx.state(module, nnx.Param)`.
      cfg: an optax gradient transformation or an `Optimizer`, for a wrapper with default settings;
        or `dict(type='OptimWrapper', optimizer=dict(type=, lr=, ...), clip_grad=,
        accumulative_counts=, paramwise_cfg=, constructor=)`, of which only `optimizer` is required.
        Or a dict of these by name, for several optimizers (see `MultiOptimWrapperConstructor`). It
        is not modified.
      module_types: dotted module path -> class name, by which rules recognise norms and
        convolutions; without it they use roles.
      roles: function from `paramwise_cfg['roles']` to the roles of the parameters, see
        `jengine.model.parameter_roles`; without it names and shapes tell roles.
      base: function from `paramwise_cfg['base']` to the base model of a parametrization, a
        `jengine.extras.optimizers.parametrizations.Base`.

    Returns:
      The result of the constructor: an OptimWrapper, or an OptimWrapperDict.

    Raises:
      TypeError: no parameters are given, such as a Model before `init`.
      ArgumentError, KeyError, TypeError, ValueError: an invalid config.
    """
    with config_path("optim_wrapper"):
        return construct(params_or_model, cfg, module_types, roles, base)


def construct(
    params_or_model: Any,
    cfg: Mapping[str, Any],
    module_types: Mapping[str, str] | None,
    roles: RolesFinder | None,
    base: BaseFinder | None,
) -> Any:
    """Build like `build_optim_wrapper`, but at the current config path.

    A config whose values are all wrappers or wrapper configs describes several optimizers by name.
    """
    if isinstance(cfg, OptimWrapper) or (isinstance(cfg, OptimWrapperDict) and len(cfg) == 1):
        return cfg
    constructor = _build_constructor(dict(cfg) if isinstance(cfg, OptimWrapperDict) else cfg)
    if hasattr(constructor, "find_roles"):
        constructor.find_roles = roles
    if hasattr(constructor, "find_base"):
        constructor.find_base = base
    # custom constructors only have to accept the model
    if "module_types" in inspect.signature(constructor.__call__).parameters:
        return constructor(params_or_model, module_types=module_types)
    return constructor(params_or_model)


def check_optim_wrapper(cfg: Any) -> dict[str, OptimWrapper]:
    """Check an optimizer wrapper config and the parameter-wise rules, as far as no parameters are
    needed.

    >>> check_optim_wrapper(dict(optimizer=dict(type="SGD", lr=0.5)))[""].get_lr()
    {'lr': [0.5]}

    Returns:
      The wrappers by name, without parameters and with one group each; a single wrapper has the
      name ''.
    """
    with config_path("optim_wrapper"):
        return build_without_params(cfg)


def build_without_params(cfg: Any) -> dict[str, OptimWrapper]:
    """Check like `check_optim_wrapper`, but at the current config path."""
    if isinstance(cfg, OptimWrapper | OptimWrapperDict):
        return wrappers_by_name(cfg)
    constructor = _build_constructor(cfg)
    # the user's own, whose rules and arguments are unknown
    if not hasattr(constructor, "build_without_params"):
        kept = {key: each for key, each in cfg.items() if key == "optimizer" or _is_wrapper(each)}
        constructor = _build_constructor(kept)
    return constructor.build_without_params()


def _build_constructor(cfg: Any) -> Any:
    if is_optimizer(cfg):
        cfg = {"optimizer": cfg}
    if not hasattr(cfg, "items"):
        raise TypeError(
            "an optimizer wrapper must be a dict or an optax gradient transformation, got "
            f"{type(cfg).__name__}: {cfg!r}"
        )
    wrapper_cfg = resolve({key: value for key, value in cfg.items() if key != "_delete_"})
    paramwise_cfg = wrapper_cfg.pop("paramwise_cfg", None)
    # A key `optimizer` is the config of one wrapper; else names of optimizers are the keys.
    has_several = (
        "optimizer" not in wrapper_cfg
        and wrapper_cfg
        and all(map(_is_wrapper, wrapper_cfg.values()))
    )
    default = "MultiOptimWrapperConstructor" if has_several else "DefaultOptimWrapperConstructor"
    name = wrapper_cfg.pop("constructor", default)
    with config_path("constructor"):
        if not isinstance(name, str) and not callable(name):
            raise TypeError(f"`constructor` must be a name or a class, got {name!r}")
        constructor_type = OPTIM_WRAPPER_CONSTRUCTORS.get(name) if isinstance(name, str) else name
    return constructor_type(optim_wrapper_cfg=wrapper_cfg, paramwise_cfg=paramwise_cfg)


def _is_wrapper(value: Any) -> bool:
    """Return whether `value` is an optimizer wrapper, a bare optimizer, or the config of a
    wrapper.
    """
    return (
        isinstance(value, OptimWrapper)
        or is_optimizer(value)
        or (hasattr(value, "items") and "optimizer" in value)
    )
