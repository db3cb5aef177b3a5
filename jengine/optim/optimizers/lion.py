"""Define Lion with the formulas of lion-pytorch, which MMEngine registers."""

from typing import Any

import optax

from jengine.annotations import Decay, NonNegative
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def Lion(
    lr: NonNegative = 1e-4, betas: tuple[Decay, Decay] = (0.9, 0.99), weight_decay: NonNegative = 0.0
) -> Optimizer:
    """Build Lion, the sign of an interpolated momentum (Chen et al., arXiv:2302.06675), with decoupled weight decay.

    Args:
      lr: learning rate.
      betas: decay rates of the interpolation whose sign is the update, and of the momentum.
      weight_decay: coefficient of the weight decay.

    Raises:
      ValueError: a setting outside its range.
    """
    settings = {"lr": lr, "betas": tuple(map(float, betas)), "weight_decay": weight_decay}
    return Optimizer("Lion", settings, _lion_parts, ("lr", "betas", "weight_decay"))


def _lion_parts(lr: Any, betas: Any, weight_decay: Any) -> Parts:
    return common.chain_with_decay([("scale_by_lion", optax.scale_by_lion(*betas))], lr, weight_decay, decoupled=True)
