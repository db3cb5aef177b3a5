"""Schedules for optimizer values (`lr`, `momentum`, ...) on the host, as functions of a counter.

A schedule is a `Formula`, a pure function of the step; `variants` creates the scheduler classes
from formulas.
"""

import importlib as _importlib
from typing import Any as _Any

from jengine.config.plugins import provided as _provided
from jengine.config.plugins import public_names as _public_names
from jengine.optim.schedules.chain import ScheduleChain as ScheduleChain
from jengine.optim.schedules.chain import chain_of as chain_of
from jengine.optim.schedules.formulas import INF as INF
from jengine.optim.schedules.formulas import Formula as Formula
from jengine.optim.schedules.scheduler import ParamScheduler as ParamScheduler
from jengine.optim.schedules.scheduler import Schedulers as Schedulers
from jengine.optim.schedules.scheduler import flatten_schedulers as flatten_schedulers
from jengine.optim.schedules.scheduler_builder import (
    build_param_schedulers as build_param_schedulers,
)
from jengine.optim.schedules.scheduler_builder import (
    check_param_schedulers as check_param_schedulers,
)
from jengine.optim.schedules.state import load_schedulers_state_dict as load_schedulers_state_dict
from jengine.optim.schedules.state import schedulers_state_dict as schedulers_state_dict


def __getattr__(name: str) -> _Any:
    # Imported on use: it makes a class of each family for each value.
    variants = _importlib.import_module("jengine.optim.schedules.variants")
    return __dir__() if name == "__all__" else getattr(variants, name)


def __dir__() -> list[str]:
    lazy = [*__getattr__("provides")["PARAM_SCHEDULERS"], *_provided("PARAM_SCHEDULERS")]
    return _public_names(__name__, [*lazy, "make_scheduler", "make_variants"])
