"""Many runs of one config: grids, random draws, searches and seeds."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.sweeps.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
