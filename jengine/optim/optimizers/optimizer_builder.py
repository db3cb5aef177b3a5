"""Build an `Optimizer` from a config or an optax gradient transformation."""

import logging
from collections.abc import Mapping
from typing import Any

import optax

from jengine.config.annotations import is_mapping
from jengine.config.errors import config_path
from jengine.config.plugins import load_provided
from jengine.config.registry import OPTIMIZERS, as_config
from jengine.optim.optimizers.optax_optimizers import from_factory, from_optax
from jengine.optim.optimizers.optimizer import Optimizer

logger = logging.getLogger("jengine")

# These select how PyTorch runs its kernels and do not change the results, so configs from PyTorch
# may keep them.
_TORCH_FLAGS = ("foreach", "fused", "capturable", "differentiable")


def build_optimizer(
    cfg: Optimizer | optax.GradientTransformation | optax.MultiSteps | Mapping[str, Any] | str,
) -> Optimizer:
    """Build an optimizer from a config, an `Optimizer` or an optax transformation.

    >>> build_optimizer(dict(type="SGD", lr=0.1)).defaults["lr"]
    0.1

    Args:
      cfg: a config, `dict(type='SGD', lr=0.1)`, in which PyTorch's execution flags (`foreach`,
        `fused`, `capturable`, `differentiable`) have no effect, and `state_dtype` is the dtype of
        the moments; an `Optimizer`, which is returned; an optax gradient transformation or an
        `optax.MultiSteps`.

    Raises:
      TypeError: none of these.
      KeyError, ValueError: an invalid config.
    """
    if isinstance(cfg, Optimizer):
        return cfg
    # Before configs: a transformation is a NamedTuple, and a tuple is what a trailing comma makes
    # of a config.
    if is_optimizer(cfg):
        return from_optax(cfg)
    with config_path("optimizer"):
        cfg = as_config(cfg)
        if not is_mapping(cfg):
            return OPTIMIZERS.build(cfg)  # raises the error
        ignored = [name for name in _TORCH_FLAGS if name in cfg]
        if ignored:
            logger.info("optimizer: ignored %s, which select PyTorch's kernels", ", ".join(ignored))
        arguments = {name: value for name, value in cfg.items() if name not in ignored}
        state_dtype = arguments.pop("state_dtype", None)
        # `dict(type=optax.adamw, ...)`: optax's functions, under their own name or another, are
        # handled as those by name.
        factory = arguments.get("type")
        if callable(factory) and factory.__module__.partition(".")[0] == "optax":
            arguments["type"] = from_factory(factory)
        built = OPTIMIZERS.build(arguments)
        built = built if isinstance(built, Optimizer) else from_optax(built)
        if state_dtype is None:
            return built
        return load_provided("optimizer_parts", "store_small")(built, state_dtype)


def is_optimizer(value: object) -> bool:
    """Return whether `value` is an `Optimizer` or a transformation of optax, not a config."""
    return isinstance(value, Optimizer | optax.GradientTransformation | optax.MultiSteps)
