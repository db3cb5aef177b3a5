"""Hooks: what happens around, and inside, the compiled step.

Those of iMIX and of self-supervised learning are imported at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jengine.hooks.check_invalid_loss import CheckInvalidLossHook as CheckInvalidLossHook
from jengine.hooks.checkpoint import CheckpointHook as CheckpointHook
from jengine.hooks.class_num_check import ClassNumCheckHook as ClassNumCheckHook
from jengine.hooks.early_stopping import EarlyStoppingHook as EarlyStoppingHook
from jengine.hooks.ema import EMAHook as EMAHook
from jengine.hooks.empty_cache import EmptyCacheHook as EmptyCacheHook
from jengine.hooks.hook import Hook as Hook
from jengine.hooks.iter_timer import IterTimerHook as IterTimerHook
from jengine.hooks.logger import LoggerHook as LoggerHook
from jengine.hooks.mean_teacher import MeanTeacherHook as MeanTeacherHook
from jengine.hooks.memory_profiler import MemoryProfilerHook as MemoryProfilerHook
from jengine.hooks.naive_visualization import NaiveVisualizationHook as NaiveVisualizationHook
from jengine.hooks.numerics_guard import NumericsGuardHook as NumericsGuardHook
from jengine.hooks.param_scheduler import ParamSchedulerHook as ParamSchedulerHook
from jengine.hooks.pipeline_switch import PipelineSwitchHook as PipelineSwitchHook
from jengine.hooks.precise_bn import PreciseBNHook as PreciseBNHook
from jengine.hooks.prepare_tta import PrepareTTAHook as PrepareTTAHook
from jengine.hooks.priority import Priority as Priority
from jengine.hooks.priority import get_priority as get_priority
from jengine.hooks.profiler import ProfilerHook as ProfilerHook
from jengine.hooks.progress import ProgressHook as ProgressHook
from jengine.hooks.runtime_info import RuntimeInfoHook as RuntimeInfoHook
from jengine.hooks.sampler_seed import DistSamplerSeedHook as DistSamplerSeedHook
from jengine.hooks.seg_visualization import SegVisualizationHook as SegVisualizationHook
from jengine.hooks.set_epoch_info import SetEpochInfoHook as SetEpochInfoHook
from jengine.hooks.switch_recipe import SwitchRecipeHook as SwitchRecipeHook
from jengine.hooks.sync_buffers import SyncBuffersHook as SyncBuffersHook
from jengine.hooks.warmup_param import WarmupParamHook as WarmupParamHook

if TYPE_CHECKING:
    from jengine.hooks import imix as imix
    from jengine.hooks import selfsup as selfsup
    from jengine.hooks.selfsup import DeepClusterHook as DeepClusterHook
    from jengine.hooks.selfsup import DenseCLHook as DenseCLHook
    from jengine.hooks.selfsup import ODCHook as ODCHook
    from jengine.hooks.selfsup import SimSiamHook as SimSiamHook
    from jengine.hooks.selfsup import SwAVHook as SwAVHook

_SELFSUP = ("DeepClusterHook", "DenseCLHook", "ODCHook", "SimSiamHook", "SwAVHook")


def __getattr__(name: str) -> Any:
    if name in ("imix", "selfsup"):
        return importlib.import_module(f"jengine.hooks.{name}")
    if name in _SELFSUP:
        return getattr(importlib.import_module("jengine.hooks.selfsup"), name)
    raise AttributeError(f"module 'jengine.hooks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "imix", "selfsup", *_SELFSUP])
