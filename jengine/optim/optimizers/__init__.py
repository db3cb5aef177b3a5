"""Optimizers, one family per module; importing this package registers them."""

from jengine.optim.optimizers.adam import Adam, Adamax, AdamW, NAdam, RAdam
from jengine.optim.optimizers.optax_optimizers import from_optax
from jengine.optim.optimizers.optimizer_builder import LBFGS, SparseAdam
from jengine.optim.optimizers.sgd import ASGD, SGD

__all__ = [
    "ASGD",
    "LBFGS",
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "SparseAdam",
    "from_optax",
]
