"""iMIX's hooks, levels, writers, optimizers, schedules and config style."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.imix.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
