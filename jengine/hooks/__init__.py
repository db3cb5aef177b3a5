"""Hooks, which act around and inside the compiled step, in the order of their priorities.

Subclass `Hook` and override stages such as `after_train_iter`. Imports the rooms up to
`evaluation`.
"""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.hooks.hook import Hook as Hook
from jengine.hooks.priority import Priority as Priority
from jengine.hooks.priority import get_priority as get_priority
from jengine.logging.loss_watch import NonFiniteLossError as NonFiniteLossError

provides = {  # imported on use, as what extras provide
    "names": {"HookList": "jengine.hooks.hook_list"},
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
