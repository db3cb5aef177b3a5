"""From what a config or a user gives as an optimizer to an `Optimizer`."""

import logging
from collections.abc import Mapping
from typing import Any

import optax

from jengine.errors import config_path
from jengine.optim.optimizers.optax_optimizers import from_factory, from_optax
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.registry import OPTIMIZERS, as_config

logger = logging.getLogger("jengine")

# How PyTorch runs its kernels. A config that carries them over means the same numbers without them.
_TORCH_EXECUTION = ("foreach", "fused", "capturable", "differentiable")


def build_optimizer(
    cfg: Optimizer | optax.GradientTransformation | optax.MultiSteps | Mapping[str, Any] | str,
) -> Optimizer:
    """Build an optimizer from anything that describes one.

    Args:
      cfg: a config, `dict(type='SGD', lr=0.1)`, in which PyTorch's execution flags (`foreach`, `fused`,
        `capturable`, `differentiable`) have no effect; an `Optimizer`, which is returned; an optax gradient
        transformation or an `optax.MultiSteps`.

    Raises:
      TypeError: none of these, or a tuple of one, which a trailing comma makes of a config.
      KeyError, ValueError: what is wrong with the config.
    """
    if isinstance(cfg, Optimizer):
        return cfg
    if isinstance(cfg, optax.GradientTransformation | optax.MultiSteps):
        return from_optax(cfg)
    with config_path("optimizer"):
        refuse_trailing_comma(cfg, "an optimizer")
        cfg = as_config(cfg)
        if not hasattr(cfg, "items"):
            raise TypeError(
                "an optimizer must be a dict with a 'type', an Optimizer or an optax gradient transformation, "
                f"got {type(cfg).__name__}: {cfg!r}"
            )
        ignored = [name for name in _TORCH_EXECUTION if name in cfg]
        if ignored:
            logger.info("optimizer: %s concern PyTorch's kernels and have no effect here", ", ".join(ignored))
        arguments = {name: value for name, value in cfg.items() if name not in ignored}
        factory = arguments.get("type")
        if callable(factory) and factory.__module__.partition(".")[0] == "optax":
            return OPTIMIZERS.build({**arguments, "type": from_factory(factory)})
        built = OPTIMIZERS.build(arguments)
        return built if isinstance(built, Optimizer) else from_optax(built)


def refuse_trailing_comma(cfg: Any, what: str) -> None:
    """Raise a TypeError that names the comma where `cfg` is a tuple of one.

    Args:
      cfg: what should be a config.
      what: its name in the message, such as 'an optimizer'.
    """
    if isinstance(cfg, tuple) and len(cfg) == 1:
        raise TypeError(f"{what} is a dict, found a tuple of one: remove the comma after `dict(...)`")
