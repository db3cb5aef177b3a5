"""Further optimizers, LARS, Adafactor, Muon and more, and learning rates that decay by layer."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.optimizers.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
