"""Hooks, which act around and inside the compiled step, in the order of their priorities.

Subclass `Hook` and override stages such as `after_train_iter`. Imports the rooms up to
`evaluation`.
"""

from typing import TYPE_CHECKING

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.hooks.hook import Hook as Hook
from jengine.hooks.priority import Priority as Priority
from jengine.hooks.priority import get_priority as get_priority
from jengine.logging.loss_watch import NonFiniteLossError as NonFiniteLossError

if TYPE_CHECKING:
    from jengine.hooks.checkpoint import CheckpointHook as CheckpointHook
    from jengine.hooks.ema import EMAHook as EMAHook
    from jengine.hooks.epoch import DistSamplerSeedHook as DistSamplerSeedHook
    from jengine.hooks.iter_timer import IterTimerHook as IterTimerHook
    from jengine.hooks.logger import LoggerHook as LoggerHook
    from jengine.hooks.param_scheduler import ParamSchedulerHook as ParamSchedulerHook
    from jengine.hooks.runtime_info import RuntimeInfoHook as RuntimeInfoHook

provides = {  # imported on use, as what extras provide
    "HOOKS": {
        "CheckpointHook": "jengine.hooks.checkpoint",
        "DistSamplerSeedHook": "jengine.hooks.epoch",
        "EMAHook": "jengine.hooks.ema",
        "IterTimerHook": "jengine.hooks.iter_timer",
        "LoggerHook": "jengine.hooks.logger",
        "ParamSchedulerHook": "jengine.hooks.param_scheduler",
        "RuntimeInfoHook": "jengine.hooks.runtime_info",
    },
}
__getattr__, __dir__ = _lazy_names(__name__, provides)
