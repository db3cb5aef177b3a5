"""Schedule values of the optimizer (`lr`, `momentum`, ...) on the host, as functions of a counter.

A schedule is a `Rule`, a pure function of the step; `variants` creates the scheduler classes from rules.
"""

from jengine.optim.schedules.build import build_param_schedulers as build_param_schedulers
from jengine.optim.schedules.build import check_param_schedulers as check_param_schedulers
from jengine.optim.schedules.replay import replay_schedulers as replay_schedulers
from jengine.optim.schedules.resume import check_scheduler_types as check_scheduler_types
from jengine.optim.schedules.resume import compare_schedulers as compare_schedulers
from jengine.optim.schedules.resume import list_moved_ends as list_moved_ends
from jengine.optim.schedules.resume import load_schedulers_state_dict as load_schedulers_state_dict
from jengine.optim.schedules.resume import reset_initial_values as reset_initial_values
from jengine.optim.schedules.resume import schedulers_state_dict as schedulers_state_dict
from jengine.optim.schedules.rules import INF as INF
from jengine.optim.schedules.rules import Rule as Rule
from jengine.optim.schedules.scheduler import ParamScheduler as ParamScheduler
from jengine.optim.schedules.scheduler import Schedulers as Schedulers
from jengine.optim.schedules.scheduler import flatten_schedulers as flatten_schedulers
from jengine.optim.schedules.variants import ConstantLR as ConstantLR
from jengine.optim.schedules.variants import ConstantMomentum as ConstantMomentum
from jengine.optim.schedules.variants import ConstantParamScheduler as ConstantParamScheduler
from jengine.optim.schedules.variants import CosineAnnealingLR as CosineAnnealingLR
from jengine.optim.schedules.variants import CosineAnnealingMomentum as CosineAnnealingMomentum
from jengine.optim.schedules.variants import CosineAnnealingParamScheduler as CosineAnnealingParamScheduler
from jengine.optim.schedules.variants import CosineAnnealingWeightDecay as CosineAnnealingWeightDecay
from jengine.optim.schedules.variants import CosineRestartLR as CosineRestartLR
from jengine.optim.schedules.variants import CosineRestartMomentum as CosineRestartMomentum
from jengine.optim.schedules.variants import CosineRestartParamScheduler as CosineRestartParamScheduler
from jengine.optim.schedules.variants import ExponentialLR as ExponentialLR
from jengine.optim.schedules.variants import ExponentialMomentum as ExponentialMomentum
from jengine.optim.schedules.variants import ExponentialParamScheduler as ExponentialParamScheduler
from jengine.optim.schedules.variants import LinearLR as LinearLR
from jengine.optim.schedules.variants import LinearMomentum as LinearMomentum
from jengine.optim.schedules.variants import LinearParamScheduler as LinearParamScheduler
from jengine.optim.schedules.variants import MultiStepLR as MultiStepLR
from jengine.optim.schedules.variants import MultiStepMomentum as MultiStepMomentum
from jengine.optim.schedules.variants import MultiStepParamScheduler as MultiStepParamScheduler
from jengine.optim.schedules.variants import OneCycleLR as OneCycleLR
from jengine.optim.schedules.variants import OneCycleParamScheduler as OneCycleParamScheduler
from jengine.optim.schedules.variants import OptaxLR as OptaxLR
from jengine.optim.schedules.variants import OptaxMomentum as OptaxMomentum
from jengine.optim.schedules.variants import OptaxParamScheduler as OptaxParamScheduler
from jengine.optim.schedules.variants import PolyLR as PolyLR
from jengine.optim.schedules.variants import PolyLRRatio as PolyLRRatio
from jengine.optim.schedules.variants import PolyMomentum as PolyMomentum
from jengine.optim.schedules.variants import PolyParamScheduler as PolyParamScheduler
from jengine.optim.schedules.variants import QuadraticWarmupLR as QuadraticWarmupLR
from jengine.optim.schedules.variants import QuadraticWarmupMomentum as QuadraticWarmupMomentum
from jengine.optim.schedules.variants import QuadraticWarmupParamScheduler as QuadraticWarmupParamScheduler
from jengine.optim.schedules.variants import ReduceOnPlateauLR as ReduceOnPlateauLR
from jengine.optim.schedules.variants import ReduceOnPlateauMomentum as ReduceOnPlateauMomentum
from jengine.optim.schedules.variants import ReduceOnPlateauParamScheduler as ReduceOnPlateauParamScheduler
from jengine.optim.schedules.variants import StepLR as StepLR
from jengine.optim.schedules.variants import StepMomentum as StepMomentum
from jengine.optim.schedules.variants import StepParamScheduler as StepParamScheduler
from jengine.optim.schedules.variants import make_scheduler as make_scheduler
from jengine.optim.schedules.variants import make_variants as make_variants
