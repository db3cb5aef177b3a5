"""Backends for experiment trackers (Weights & Biases, MLflow, Aim, ClearML, Comet, Trackio) and for
CSV.
"""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.trackers.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
