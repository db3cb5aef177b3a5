"""Pictures of semantic segmentation, in MMSegmentation's manner; its metric is in `metrics`."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.segmentation.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
