"""Networks: a transformer, a vision transformer, a small CNN, experts, LoRA and quantization."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.networks.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
