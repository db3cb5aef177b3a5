"""Weights of other libraries: safetensors, PyTorch and Hugging Face, read and written."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.weights.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
