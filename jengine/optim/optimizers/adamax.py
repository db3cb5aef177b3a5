"""Adamax as torch.optim.Adamax defines it."""

from collections.abc import Sequence
from typing import Any

import optax

from jengine.optim import core
from jengine.optim.core import Optimizer, Parts
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def Adamax(
    lr: float = 2e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Build Adam with the infinity norm (Kingma and Ba, arXiv:1412.6980) and coupled weight decay.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("Adamax", lr=lr, eps=eps, weight_decay=weight_decay)
    betas = core.betas_in_range("Adamax", betas)
    settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    return Optimizer("Adamax", settings, _parts, ("lr", "betas", "eps", "weight_decay"))


def _parts(lr: Any, betas: Any, eps: Any, weight_decay: Any, maximize: bool) -> Parts:
    scale = [("scale_by_adamax", optax.scale_by_adamax(*betas, eps))]
    return core.chain_with_decay(scale, lr, weight_decay, decoupled=False, maximize=maximize)
