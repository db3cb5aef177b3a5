"""Distillation: a frozen teacher in the step, and frozen models for losses of one's own."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.distill.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
