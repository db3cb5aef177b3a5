"""Parameter schedulers: values of the optimizer (`lr`, `momentum`, ...) as functions of a counter, on the host.

A schedule is a `Rule`, a pure function of the step; the scheduler classes are made of rules in `variants`, those of
iMIX, which are imported at first use, in `imix_variants`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jengine.optim.schedulers.build import Schedulers as Schedulers
from jengine.optim.schedulers.build import build_param_schedulers as build_param_schedulers
from jengine.optim.schedulers.build import flatten_schedulers as flatten_schedulers
from jengine.optim.schedulers.resume import load_schedulers_state_dict as load_schedulers_state_dict
from jengine.optim.schedulers.resume import replay as replay
from jengine.optim.schedulers.resume import schedulers_state_dict as schedulers_state_dict
from jengine.optim.schedulers.rules import INF as INF
from jengine.optim.schedulers.rules import Rule as Rule
from jengine.optim.schedulers.scheduler import ParamScheduler as ParamScheduler
from jengine.optim.schedulers.variants import ConstantLR as ConstantLR
from jengine.optim.schedulers.variants import ConstantMomentum as ConstantMomentum
from jengine.optim.schedulers.variants import ConstantParamScheduler as ConstantParamScheduler
from jengine.optim.schedulers.variants import CosineAnnealingLR as CosineAnnealingLR
from jengine.optim.schedulers.variants import CosineAnnealingMomentum as CosineAnnealingMomentum
from jengine.optim.schedulers.variants import CosineAnnealingParamScheduler as CosineAnnealingParamScheduler
from jengine.optim.schedulers.variants import CosineAnnealingWeightDecay as CosineAnnealingWeightDecay
from jengine.optim.schedulers.variants import CosineRestartLR as CosineRestartLR
from jengine.optim.schedulers.variants import CosineRestartMomentum as CosineRestartMomentum
from jengine.optim.schedulers.variants import CosineRestartParamScheduler as CosineRestartParamScheduler
from jengine.optim.schedulers.variants import ExponentialLR as ExponentialLR
from jengine.optim.schedulers.variants import ExponentialMomentum as ExponentialMomentum
from jengine.optim.schedulers.variants import ExponentialParamScheduler as ExponentialParamScheduler
from jengine.optim.schedulers.variants import LinearLR as LinearLR
from jengine.optim.schedulers.variants import LinearMomentum as LinearMomentum
from jengine.optim.schedulers.variants import LinearParamScheduler as LinearParamScheduler
from jengine.optim.schedulers.variants import MultiStepLR as MultiStepLR
from jengine.optim.schedulers.variants import MultiStepMomentum as MultiStepMomentum
from jengine.optim.schedulers.variants import MultiStepParamScheduler as MultiStepParamScheduler
from jengine.optim.schedulers.variants import OneCycleLR as OneCycleLR
from jengine.optim.schedulers.variants import OneCycleParamScheduler as OneCycleParamScheduler
from jengine.optim.schedulers.variants import OptaxLR as OptaxLR
from jengine.optim.schedulers.variants import OptaxMomentum as OptaxMomentum
from jengine.optim.schedulers.variants import OptaxParamScheduler as OptaxParamScheduler
from jengine.optim.schedulers.variants import PolyLR as PolyLR
from jengine.optim.schedulers.variants import PolyLRRatio as PolyLRRatio
from jengine.optim.schedulers.variants import PolyMomentum as PolyMomentum
from jengine.optim.schedulers.variants import PolyParamScheduler as PolyParamScheduler
from jengine.optim.schedulers.variants import QuadraticWarmupLR as QuadraticWarmupLR
from jengine.optim.schedulers.variants import QuadraticWarmupMomentum as QuadraticWarmupMomentum
from jengine.optim.schedulers.variants import QuadraticWarmupParamScheduler as QuadraticWarmupParamScheduler
from jengine.optim.schedulers.variants import ReduceOnPlateauLR as ReduceOnPlateauLR
from jengine.optim.schedulers.variants import ReduceOnPlateauMomentum as ReduceOnPlateauMomentum
from jengine.optim.schedulers.variants import ReduceOnPlateauParamScheduler as ReduceOnPlateauParamScheduler
from jengine.optim.schedulers.variants import StepLR as StepLR
from jengine.optim.schedulers.variants import StepMomentum as StepMomentum
from jengine.optim.schedulers.variants import StepParamScheduler as StepParamScheduler
from jengine.optim.schedulers.variants import make_scheduler as make_scheduler
from jengine.optim.schedulers.variants import make_variants as make_variants

if TYPE_CHECKING:
    from jengine.optim.schedulers.imix_variants import BertWarmupLinearLR as BertWarmupLinearLR
    from jengine.optim.schedulers.imix_variants import ConstantSchedule as ConstantSchedule
    from jengine.optim.schedulers.imix_variants import MultiStepScheduler as MultiStepScheduler
    from jengine.optim.schedulers.imix_variants import PythiaScheduler as PythiaScheduler
    from jengine.optim.schedulers.imix_variants import ReduceOnPlateauSchedule as ReduceOnPlateauSchedule
    from jengine.optim.schedulers.imix_variants import WarmupConstantSchedule as WarmupConstantSchedule
    from jengine.optim.schedulers.imix_variants import WarmupCosineLR as WarmupCosineLR
    from jengine.optim.schedulers.imix_variants import WarmupCosineSchedule as WarmupCosineSchedule
    from jengine.optim.schedulers.imix_variants import (
        WarmupCosineWithHardRestartsSchedule as WarmupCosineWithHardRestartsSchedule,
    )
    from jengine.optim.schedulers.imix_variants import WarmupLinearSchedule as WarmupLinearSchedule
    from jengine.optim.schedulers.imix_variants import WarmupLinearScheduleNonZero as WarmupLinearScheduleNonZero
    from jengine.optim.schedulers.imix_variants import WarmupMultiStepLR as WarmupMultiStepLR
    from jengine.optim.schedulers.imix_variants import WarmupPolynomialSchedule as WarmupPolynomialSchedule

_IMIX = (
    "BertWarmupLinearLR",
    "ConstantSchedule",
    "MultiStepScheduler",
    "PythiaScheduler",
    "ReduceOnPlateauSchedule",
    "WarmupConstantSchedule",
    "WarmupCosineLR",
    "WarmupCosineSchedule",
    "WarmupCosineWithHardRestartsSchedule",
    "WarmupLinearSchedule",
    "WarmupLinearScheduleNonZero",
    "WarmupMultiStepLR",
    "WarmupPolynomialSchedule",
)


def __getattr__(name: str) -> Any:
    if name in _IMIX:
        return getattr(importlib.import_module("jengine.optim.schedulers.imix_variants"), name)
    raise AttributeError(f"module 'jengine.optim.schedulers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_IMIX])
