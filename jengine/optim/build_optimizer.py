"""Build an optimizer."""

from typing import Any

import optax

from jengine.optim.core import Optimizer
from jengine.optim.optimizers.optax_named import from_optax
from jengine.registry import OPTIMIZERS


def build_optimizer(optimizer: Any) -> Optimizer:
    """Placeholder until merge."""
    if isinstance(optimizer, optax.GradientTransformation):
        return from_optax(optimizer)
    return optimizer if isinstance(optimizer, Optimizer) else OPTIMIZERS.build(optimizer)
