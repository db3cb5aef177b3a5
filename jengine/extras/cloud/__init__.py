"""Work dirs and files in buckets: leases, staging, uploads and downloads."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.cloud.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
