"""`jengine plan`: memory, collectives and time of a run on devices that are not here."""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.plan.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
