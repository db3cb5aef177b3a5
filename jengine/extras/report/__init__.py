"""`jengine report` and `jengine table`: pages and tables of runs on disk."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.report.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
