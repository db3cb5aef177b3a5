# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.diagnose.invalid_loss import CheckInvalidLossHook as CheckInvalidLossHook
from jengine.extras.optimizers.early_stopping import EarlyStoppingHook as EarlyStoppingHook
from jengine.extras.replicas.sync_buffers import SyncBuffersHook as SyncBuffersHook
from jengine.extras.report.progress import ProgressHook as ProgressHook
from jengine.hooks.checkpoint import CheckpointHook as CheckpointHook
from jengine.hooks.ema import EMAHook as EMAHook
from jengine.hooks.epoch import DistSamplerSeedHook as DistSamplerSeedHook
from jengine.hooks.hook import Hook as Hook
from jengine.hooks.hook_list import HookList as HookList
from jengine.hooks.iter_timer import IterTimerHook as IterTimerHook
from jengine.hooks.logger import LoggerHook as LoggerHook
from jengine.hooks.param_scheduler import ParamSchedulerHook as ParamSchedulerHook
from jengine.hooks.priority import Priority as Priority
from jengine.hooks.priority import get_priority as get_priority
from jengine.hooks.runtime_info import RuntimeInfoHook as RuntimeInfoHook
from jengine.logging.loss_watch import NonFiniteLossError as NonFiniteLossError
