"""Images with boxes, masks, points and text for visualizers."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.drawing.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
