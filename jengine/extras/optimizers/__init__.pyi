# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.optimizers.adafactor import TorchAdafactor as TorchAdafactor
from jengine.extras.optimizers.adagrad import Adadelta as Adadelta
from jengine.extras.optimizers.adagrad import Adagrad as Adagrad
from jengine.extras.optimizers.adam_variants import Adamax as Adamax
from jengine.extras.optimizers.adam_variants import NAdam as NAdam
from jengine.extras.optimizers.adam_variants import RAdam as RAdam
from jengine.extras.optimizers.adan import ProximalAdan as ProximalAdan
from jengine.extras.optimizers.aliases import Adafactor as Adafactor
from jengine.extras.optimizers.aliases import Adan as Adan
from jengine.extras.optimizers.amp import AmpOptimWrapper as AmpOptimWrapper
from jengine.extras.optimizers.averaged_sgd import ASGD as ASGD
from jengine.extras.optimizers.averages import CosineEMA as CosineEMA
from jengine.extras.optimizers.averages import ExpMomentumEMA as ExpMomentumEMA
from jengine.extras.optimizers.averages import MomentumAnnealingEMA as MomentumAnnealingEMA
from jengine.extras.optimizers.averages import StochasticWeightAverage as StochasticWeightAverage
from jengine.extras.optimizers.early_stopping import EarlyStoppingHook as EarlyStoppingHook
from jengine.extras.optimizers.estimated_rate import DAdaptAdam as DAdaptAdam
from jengine.extras.optimizers.estimated_rate import Prodigy as Prodigy
from jengine.extras.optimizers.evaluated_params import EvaluatedParamsHook as EvaluatedParamsHook
from jengine.extras.optimizers.evaluated_params import LookaheadHook as LookaheadHook
from jengine.extras.optimizers.evaluated_params import ScheduleFreeHook as ScheduleFreeHook
from jengine.extras.optimizers.large_batch import LARS as LARS
from jengine.extras.optimizers.large_batch import Lamb as Lamb
from jengine.extras.optimizers.layer_decay import LayerDecayOptimizerConstructor as LayerDecayOptimizerConstructor
from jengine.extras.optimizers.layer_decay import LearningRateDecayOptimWrapperConstructor as LearningRateDecayOptimWrapperConstructor
from jengine.extras.optimizers.layer_decay import LearningRateDecayOptimizerConstructor as LearningRateDecayOptimizerConstructor
from jengine.extras.optimizers.multi_constructor import MultiOptimWrapperConstructor as MultiOptimWrapperConstructor
from jengine.extras.optimizers.orthogonal_momentum import Lion as Lion
from jengine.extras.optimizers.orthogonal_momentum import Muon as Muon
from jengine.extras.optimizers.orthogonal_momentum import NorMuon as NorMuon
from jengine.extras.optimizers.orthogonal_momentum import TorchMuon as TorchMuon
from jengine.extras.optimizers.orthogonal_momentum import muon as muon
from jengine.extras.optimizers.plateau import PlateauScheduler
from jengine.extras.optimizers.rmsprop import RMSprop as RMSprop
from jengine.extras.optimizers.rmsprop import Rprop as Rprop
from jengine.extras.optimizers.schedules import OneCycleLR as OneCycleLR
from jengine.extras.optimizers.schedules import OneCycleParamScheduler as OneCycleParamScheduler
from jengine.extras.optimizers.schedules import PolyLRRatio as PolyLRRatio
from jengine.extras.optimizers.shampoo import Shampoo as Shampoo
from jengine.extras.optimizers.small_state import compress_moments as compress_moments
from jengine.extras.optimizers.soap import SOAP as SOAP
from jengine.optim.schedules.scheduler import ParamScheduler
from typing import Any

class CosineRestartLR(ParamScheduler):
    def __init__(self, optimizer: Any, periods: Any, restart_weights: Any = ..., eta_min: Any = ..., eta_min_ratio: Any = ..., begin: Any = ..., end: Any = ..., last_step: Any = ..., by_epoch: Any = ..., verbose: Any = ...) -> None: ...
class CosineRestartMomentum(ParamScheduler):
    def __init__(self, optimizer: Any, periods: Any, restart_weights: Any = ..., eta_min: Any = ..., eta_min_ratio: Any = ..., begin: Any = ..., end: Any = ..., last_step: Any = ..., by_epoch: Any = ..., verbose: Any = ...) -> None: ...
class CosineRestartParamScheduler(ParamScheduler):
    def __init__(self, optimizer: Any, param_name: Any, periods: Any, restart_weights: Any = ..., eta_min: Any = ..., eta_min_ratio: Any = ..., begin: Any = ..., end: Any = ..., last_step: Any = ..., by_epoch: Any = ..., verbose: Any = ...) -> None: ...
class QuadraticWarmupLR(ParamScheduler):
    def __init__(self, optimizer: Any, begin: Any = ..., end: Any = ..., last_step: Any = ..., by_epoch: Any = ..., verbose: Any = ...) -> None: ...
class QuadraticWarmupMomentum(ParamScheduler):
    def __init__(self, optimizer: Any, begin: Any = ..., end: Any = ..., last_step: Any = ..., by_epoch: Any = ..., verbose: Any = ...) -> None: ...
class QuadraticWarmupParamScheduler(ParamScheduler):
    def __init__(self, optimizer: Any, param_name: Any, begin: Any = ..., end: Any = ..., last_step: Any = ..., by_epoch: Any = ..., verbose: Any = ...) -> None: ...
class ReduceOnPlateauLR(PlateauScheduler):
    def __init__(self, optimizer: Any, monitor: Any = ..., rule: Any = ..., factor: Any = ..., patience: Any = ..., threshold: Any = ..., threshold_rule: Any = ..., cooldown: Any = ..., min_value: Any = ..., eps: Any = ..., begin: Any = ..., end: Any = ..., last_step: Any = ..., by_epoch: Any = ..., verbose: Any = ...) -> None: ...
class ReduceOnPlateauMomentum(PlateauScheduler):
    def __init__(self, optimizer: Any, monitor: Any = ..., rule: Any = ..., factor: Any = ..., patience: Any = ..., threshold: Any = ..., threshold_rule: Any = ..., cooldown: Any = ..., min_value: Any = ..., eps: Any = ..., begin: Any = ..., end: Any = ..., last_step: Any = ..., by_epoch: Any = ..., verbose: Any = ...) -> None: ...
class ReduceOnPlateauParamScheduler(PlateauScheduler):
    def __init__(self, optimizer: Any, param_name: Any, monitor: Any = ..., rule: Any = ..., factor: Any = ..., patience: Any = ..., threshold: Any = ..., threshold_rule: Any = ..., cooldown: Any = ..., min_value: Any = ..., eps: Any = ..., begin: Any = ..., end: Any = ..., last_step: Any = ..., by_epoch: Any = ..., verbose: Any = ...) -> None: ...
