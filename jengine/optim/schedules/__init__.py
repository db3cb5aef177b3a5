"""Schedules for optimizer values (`lr`, `momentum`, ...) on the host, as functions of a counter.

A schedule is a `Rule`, a pure function of the step; `variants` creates the scheduler classes from rules.
"""

from jengine.optim.schedules.resume import check_scheduler_types as check_scheduler_types
from jengine.optim.schedules.resume import compare_schedulers as compare_schedulers
from jengine.optim.schedules.resume import list_moved_ends as list_moved_ends
from jengine.optim.schedules.resume import load_schedulers_state_dict as load_schedulers_state_dict
from jengine.optim.schedules.resume import replay_schedulers as replay_schedulers
from jengine.optim.schedules.resume import reset_initial_values as reset_initial_values
from jengine.optim.schedules.resume import schedulers_state_dict as schedulers_state_dict
from jengine.optim.schedules.rules import INF as INF
from jengine.optim.schedules.rules import Rule as Rule
from jengine.optim.schedules.scheduler import ParamScheduler as ParamScheduler
from jengine.optim.schedules.scheduler import Schedulers as Schedulers
from jengine.optim.schedules.scheduler import flatten_schedulers as flatten_schedulers
from jengine.optim.schedules.scheduler_builder import build_param_schedulers as build_param_schedulers
from jengine.optim.schedules.scheduler_builder import check_param_schedulers as check_param_schedulers
from jengine.optim.schedules.variants import *  # noqa: F403
