"""Models after training: loaded from a checkpoint, exported, with predictions for any data."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.serving.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
