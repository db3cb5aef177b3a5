"""The training step, with state and traced hooks, and what replays and inspects it."""

from jengine.train.flops import count_flops as count_flops
from jengine.train.losses import total_loss as total_loss
from jengine.train.own_step import LossGradients as LossGradients
from jengine.train.own_step import UpdateContext as UpdateContext
from jengine.train.phases import PhaseSettings as PhaseSettings
from jengine.train.recompilation import RecompilationError as RecompilationError
from jengine.train.recompilation import RecompilationGuard as RecompilationGuard
from jengine.train.recompilation import check_on_recompile as check_on_recompile
from jengine.train.recompilation import compilation_counter as compilation_counter
from jengine.train.replay import Findings as Findings
from jengine.train.replay import replay_step as replay_step
from jengine.train.scanned_step import ScannedMetrics as ScannedMetrics
from jengine.train.scanned_step import build_scanned_step as build_scanned_step
from jengine.train.state import TrainState as TrainState
from jengine.train.state import create_train_state as create_train_state
from jengine.train.step import TrainStep as TrainStep
from jengine.train.step import build_eval_step as build_eval_step
from jengine.train.step import build_train_step as build_train_step
from jengine.train.traced_hooks import StepContext as StepContext
from jengine.train.traced_hooks import hook_names as hook_names
