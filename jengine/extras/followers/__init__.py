"""Evaluation of a run's checkpoints in processes of their own, while it trains."""

from jengine.config.plugins import lazy_names
from jengine.extras.followers.plugin import provides

__getattr__, __dir__ = lazy_names(__name__, provides)
