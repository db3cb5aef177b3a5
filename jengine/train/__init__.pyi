# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.optimizers.averages import MomentumAnnealingEMA as MomentumAnnealingEMA
from jengine.extras.optimizers.averages import StochasticWeightAverage as StochasticWeightAverage
from jengine.extras.optimizers.own_step import LossGradients as LossGradients
from jengine.extras.optimizers.own_step import UpdateContext as UpdateContext
from jengine.train.average import AVERAGES as AVERAGES
from jengine.train.average import Average as Average
from jengine.train.average import AverageState as AverageState
from jengine.train.average import ExponentialMovingAverage as ExponentialMovingAverage
from jengine.train.losses import total_loss as total_loss
from jengine.train.phases import PhaseSettings as PhaseSettings
from jengine.train.recompilation import RecompilationError as RecompilationError
from jengine.train.recompilation import RecompilationGuard as RecompilationGuard
from jengine.train.recompilation import compilation_counter as compilation_counter
from jengine.train.scanned_step import ScannedMetrics as ScannedMetrics
from jengine.train.scanned_step import build_scanned_step as build_scanned_step
from jengine.train.state import TrainState as TrainState
from jengine.train.state import create_train_state as create_train_state
from jengine.train.step import TrainStep as TrainStep
from jengine.train.step import build_eval_step as build_eval_step
from jengine.train.step import build_train_step as build_train_step
from jengine.train.traced_hooks import StepContext as StepContext
from jengine.train.traced_hooks import hook_names as hook_names
