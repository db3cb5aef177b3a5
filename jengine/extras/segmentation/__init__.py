"""Semantic segmentation in MMSegmentation's manner: metric and visualization hook."""

from jengine.config.plugins import lazy_names
from jengine.extras.segmentation.plugin import provides

__getattr__, __dir__ = lazy_names(__name__, provides)
