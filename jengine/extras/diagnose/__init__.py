"""What explains and inspects runs: `--debug`, replayed steps, profiles, and causes of errors."""

from jengine.config.plugins import lazy_names
from jengine.extras.diagnose.plugin import provides

__getattr__, __dir__ = lazy_names(__name__, provides)
