"""Adadelta as torch.optim.Adadelta defines it."""

from typing import Any

import optax

from jengine.optim import core
from jengine.optim.core import Optimizer, Parts
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def Adadelta(
    lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, maximize: bool = False
) -> Optimizer:
    """Build Adadelta (Zeiler, arXiv:1212.5701) with coupled weight decay.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("Adadelta", lr=lr, eps=eps, weight_decay=weight_decay)
    core.in_range("Adadelta", below=1.0, rho=rho)
    settings = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    return Optimizer("Adadelta", settings, _parts, ("lr", "rho", "eps", "weight_decay"))


def _parts(lr: Any, rho: Any, eps: Any, weight_decay: Any, maximize: bool) -> Parts:
    scale = [("scale_by_adadelta", optax.scale_by_adadelta(rho, eps))]
    return core.chain_with_decay(scale, lr, weight_decay, decoupled=False, maximize=maximize)
