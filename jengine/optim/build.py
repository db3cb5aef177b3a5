"""From the `optim_wrapper` of a config to an optimizer wrapper."""

import inspect
from collections.abc import Mapping
from typing import Any

import optax

from jengine.config import resolve
from jengine.errors import config_path
from jengine.optim.optimizers.build import refuse_trailing_comma
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict
from jengine.registry import OPTIM_WRAPPER_CONSTRUCTORS


def build_optim_wrapper(
    params_or_model: Any, cfg: Mapping[str, Any], *, module_types: Mapping[str, str] | None = None
) -> Any:
    """Build an optimizer wrapper.

    Args:
      params_or_model: a pytree of arrays or ShapeDtypeStructs; an `nnx.State` or `nnx.Module`, whose `nnx.Param`s are
        trained (a module also gives its types); or an object that has parameters as `params` (and perhaps
        `module_types`). Hand the wrapper trees of the same paths afterwards: the parameters themselves, for a module
        `nnx.state(module, nnx.Param)`.
      cfg: an optax gradient transformation or an `Optimizer` for a wrapper with nothing else; or
        `dict(type='OptimWrapper', optimizer=dict(type=, lr=, ...), clip_grad=, accumulative_counts=,
        paramwise_cfg=, constructor=)`; only `optimizer` is needed. Or a dict of such by name, for several optimizers
        (see `MultiOptimWrapperConstructor`). It is left as it was.
      module_types: dotted module path -> class name, from which rules know norms and convolutions; without it they
        go by names and shapes.

    Returns:
      What the constructor returns: an OptimWrapper, or an OptimWrapperDict.

    Raises:
      TypeError: no parameters are given, such as a Model before its `init`.
      AssertionError, KeyError, TypeError, ValueError: what is wrong with the config.
    """
    with config_path("optim_wrapper"):
        return construct(params_or_model, cfg, module_types)


def construct(params_or_model: Any, cfg: Mapping[str, Any], module_types: Mapping[str, str] | None) -> Any:
    """Build like `build_optim_wrapper`, from a config at the current config path.

    A config whose entries are all wrappers, or configs of one, describes several optimizers by name.
    """
    refuse_trailing_comma(cfg, "an optimizer wrapper")
    if isinstance(cfg, OptimWrapper | OptimWrapperDict):
        return cfg
    constructor = _build_constructor(cfg)
    # a constructor of one's own need take the model alone
    if "module_types" in inspect.signature(constructor.__call__).parameters:
        return constructor(params_or_model, module_types=module_types)
    return constructor(params_or_model)


def check_optim_wrapper(cfg: Any) -> None:
    """Check the form of an optimizer wrapper's config and its parameter-wise rules, which need no parameters."""
    with config_path("optim_wrapper"):
        refuse_trailing_comma(cfg, "an optimizer wrapper")
        if not isinstance(cfg, OptimWrapper | OptimWrapperDict):
            _build_constructor(cfg)


def _build_constructor(cfg: Any) -> Any:
    if isinstance(cfg, Optimizer | optax.GradientTransformation | optax.MultiSteps):
        cfg = {"optimizer": cfg}
    if callable(cfg):
        name = getattr(cfg, "__name__", "NAME")
        raise TypeError(
            f"an optimizer wrapper is a dict or an optax gradient transformation, found the function {name}; call it, "
            f"`{name}(1e-3)`, or write `dict(optimizer=dict(type={name}, learning_rate=1e-3))`"
        )
    if not hasattr(cfg, "items"):
        raise TypeError(f"an optimizer wrapper is a dict, found {type(cfg).__name__}: {cfg!r}")
    own = resolve({key: value for key, value in cfg.items() if key != "_delete_"})
    paramwise_cfg = own.pop("paramwise_cfg", None)
    several = "optimizer" not in own and own and all(_describes_one(value) for value in own.values())
    default = "MultiOptimWrapperConstructor" if several else "DefaultOptimWrapperConstructor"
    name = own.pop("constructor", default)
    with config_path("constructor"):
        entry = OPTIM_WRAPPER_CONSTRUCTORS.get(name) if isinstance(name, str) else name
    return entry(optim_wrapper_cfg=own, paramwise_cfg=paramwise_cfg)


def _describes_one(value: Any) -> bool:
    return isinstance(value, OptimWrapper) or (hasattr(value, "items") and "optimizer" in value)
