"""The hooks of iMIX: its level scale, its six methods, its hooks and writers, and its style of config."""

from jengine.hooks.imix.anomaly import AutogradAnomalyDetectHook as AutogradAnomalyDetectHook
from jengine.hooks.imix.checkpoint import CheckPointHook as CheckPointHook
from jengine.hooks.imix.ema import EMAEpochHook as EMAEpochHook
from jengine.hooks.imix.ema import EMAIterHook as EMAIterHook
from jengine.hooks.imix.evaluate import EvaluateHook as EvaluateHook
from jengine.hooks.imix.from_imix import from_imix as from_imix
from jengine.hooks.imix.hook_base import HookBase as HookBase
from jengine.hooks.imix.hook_base import register_hooks as register_hooks
from jengine.hooks.imix.iteration_timer import IterationTimerHook as IterationTimerHook
from jengine.hooks.imix.level import PriorityStatus as PriorityStatus
from jengine.hooks.imix.level import get_level as get_level
from jengine.hooks.imix.level import to_priority as to_priority
from jengine.hooks.imix.log_buffer import Bins as Bins
from jengine.hooks.imix.log_buffer import Image as Image
from jengine.hooks.imix.lr_scheduler import LRSchedulerHook as LRSchedulerHook
from jengine.hooks.imix.lr_scheduler import MomentumSchedulerHook as MomentumSchedulerHook
from jengine.hooks.imix.optimizer import Fp16OptimizerHook as Fp16OptimizerHook
from jengine.hooks.imix.optimizer import OptimizerHook as OptimizerHook
from jengine.hooks.imix.periodic_logger import PeriodicLogger as PeriodicLogger
from jengine.hooks.imix.profiler import AutogradProfilerHook as AutogradProfilerHook
from jengine.hooks.imix.text_logger import TextLoggerHook as TextLoggerHook
from jengine.hooks.imix.writers import WRITERS as WRITERS
from jengine.hooks.imix.writers import CommonMetricLoggerHook as CommonMetricLoggerHook
from jengine.hooks.imix.writers import JSONLoggerHook as JSONLoggerHook
from jengine.hooks.imix.writers import LogBufferWriter as LogBufferWriter
from jengine.hooks.imix.writers import TensorboardLoggerHook as TensorboardLoggerHook
