"""The registered schedulers of iMIX. They count iterations, and are imported at first use."""

from typing import Any

from jengine.optim.schedulers import imix
from jengine.optim.schedulers.plateau import PlateauScheduler
from jengine.optim.schedulers.scheduler import ParamScheduler
from jengine.optim.schedulers.variants import make_scheduler


def _make_imix(name: str, family: type[Any]) -> type[ParamScheduler]:
    return make_scheduler(name, family, "lr", by_epoch=False)


WarmupMultiStepLR = _make_imix("WarmupMultiStepLR", imix.WarmupMultiStepRule)
WarmupCosineLR = _make_imix("WarmupCosineLR", imix.WarmupCosineRule)
PythiaScheduler = _make_imix("PythiaScheduler", imix.PythiaRule)
MultiStepScheduler = _make_imix("MultiStepScheduler", imix.PythiaMultiStepRule)
WarmupLinearScheduleNonZero = _make_imix("WarmupLinearScheduleNonZero", imix.WarmupLinearNonZeroRule)
BertWarmupLinearLR = _make_imix("BertWarmupLinearLR", imix.BertWarmupLinearRule)
ConstantSchedule = _make_imix("ConstantSchedule", imix.UnchangedRule)
WarmupConstantSchedule = _make_imix("WarmupConstantSchedule", imix.WarmupRule)
WarmupLinearSchedule = _make_imix("WarmupLinearSchedule", imix.WarmupLinearRule)
WarmupCosineSchedule = _make_imix("WarmupCosineSchedule", imix.WarmupHalfCosineRule)
WarmupCosineWithHardRestartsSchedule = _make_imix("WarmupCosineWithHardRestartsSchedule", imix.WarmupCosineRestartsRule)
WarmupPolynomialSchedule = _make_imix("WarmupPolynomialSchedule", imix.WarmupPolynomialRule)
ReduceOnPlateauSchedule = make_scheduler("ReduceOnPlateauSchedule", imix.ImixPlateauSettings, "lr", PlateauScheduler)
