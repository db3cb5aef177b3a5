"""Hooks: what happens around, and inside, the compiled step."""

from jengine.hooks import imix as imix
from jengine.hooks.checkpoint import CheckpointHook as CheckpointHook
from jengine.hooks.early_stopping import EarlyStoppingHook as EarlyStoppingHook
from jengine.hooks.ema import EMAHook as EMAHook
from jengine.hooks.hook import Hook as Hook
from jengine.hooks.iter_timer import IterTimerHook as IterTimerHook
from jengine.hooks.logger import LoggerHook as LoggerHook
from jengine.hooks.numerics_guard import NumericsGuardHook as NumericsGuardHook
from jengine.hooks.param_scheduler import ParamSchedulerHook as ParamSchedulerHook
from jengine.hooks.priority import Priority as Priority
from jengine.hooks.priority import get_priority as get_priority
from jengine.hooks.progress import ProgressHook as ProgressHook
from jengine.hooks.runtime_info import RuntimeInfoHook as RuntimeInfoHook
from jengine.hooks.sampler_seed import DistSamplerSeedHook as DistSamplerSeedHook
from jengine.hooks.seg_visualization import SegVisualizationHook as SegVisualizationHook
from jengine.hooks.selfsup import DeepClusterHook as DeepClusterHook
from jengine.hooks.selfsup import DenseCLHook as DenseCLHook
from jengine.hooks.selfsup import ODCHook as ODCHook
from jengine.hooks.selfsup import SimSiamHook as SimSiamHook
from jengine.hooks.selfsup import SwAVHook as SwAVHook
from jengine.hooks.sync_buffers import SyncBuffersHook as SyncBuffersHook
