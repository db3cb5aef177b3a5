"""MMEngine's config files and names, and the command that converts its configs."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.mmengine.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
