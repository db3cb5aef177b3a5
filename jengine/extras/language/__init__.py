"""Language models: generation, tokenizers, chat templates and packed text."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.language.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
