"""What explains and inspects runs: `--debug`, replayed steps, profiles, and causes of errors."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.diagnose.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
