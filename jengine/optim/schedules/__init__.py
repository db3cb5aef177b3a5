"""Schedules for optimizer values (`lr`, `momentum`, ...) on the host, as functions of a counter.

A schedule is a `Formula`, a pure function of the step; `variants` creates the scheduler classes
from formulas.
"""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from jengine.optim.schedules.variants import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # Imported on use: it makes a class of each family for each value.
    return getattr(importlib.import_module("jengine.optim.schedules.variants"), name)
