"""Experiments and packages to begin with, which `jengine new` writes."""

from jengine.config.plugins import lazy_names
from jengine.extras.starter.plugin import provides

__getattr__, __dir__ = lazy_names(__name__, provides)
