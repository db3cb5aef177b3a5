"""Replicas with statistics of their own, as in PyTorch's DistributedDataParallel."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.replicas.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
