"""Optimizers, one family per module; importing this package registers them."""

from jengine.optim.optimizers.adafactor import Adafactor, TorchAdafactor
from jengine.optim.optimizers.adagrad import Adadelta, Adagrad
from jengine.optim.optimizers.adam import Adam, Adamax, AdamW, NAdam, RAdam
from jengine.optim.optimizers.adan import Adan, ProximalAdan
from jengine.optim.optimizers.large_batch import LARS, Lamb
from jengine.optim.optimizers.muon import Lion, Muon, TorchMuon
from jengine.optim.optimizers.optax_optimizers import from_optax
from jengine.optim.optimizers.optimizer_builder import LBFGS, SparseAdam
from jengine.optim.optimizers.rmsprop import RMSprop, Rprop
from jengine.optim.optimizers.sgd import ASGD, SGD

__all__ = [
    "ASGD",
    "LARS",
    "LBFGS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "Lamb",
    "Lion",
    "Muon",
    "NAdam",
    "ProximalAdan",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
    "TorchAdafactor",
    "TorchMuon",
    "from_optax",
]
