"""Metrics beyond accuracy (classification, ranking, regression, language), and other libraries'."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.metrics.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
