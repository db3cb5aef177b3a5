"""The training step: state, gradients, scanned chunks, compiled programs and parameter averages.

`build_train_step` makes the pure function `step(state, batch, hyperparams)`; `TrainState` is all
that changes in it. Imports the rooms up to `checkpoint`.
"""

from jengine.config.plugins import lazy_names as _lazy_names
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

provides = {  # imported on use, as what extras provide
    "AVERAGES": {
        "ExponentialMovingAverage": "jengine.train.average",
    },
    "names": {
        "Average": "jengine.train.average",
        "AVERAGES": "jengine.train.average",
        "AverageState": "jengine.train.average",
    },
}
__getattr__, __dir__ = _lazy_names(__name__, provides)
