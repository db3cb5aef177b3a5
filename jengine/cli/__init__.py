"""The command `jengine`; extras add further commands."""

from jengine.cli.main import main as main
from jengine.config.plugins import lazy_names as _lazy_names

__getattr__, __dir__ = _lazy_names(__name__, {})
