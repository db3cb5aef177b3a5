"""Self-supervised learning in MMSelfSup's manner: hooks, and pure functions for such models."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.selfsup.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
