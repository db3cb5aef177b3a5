"""The training step: its state, its builder, and what traced hooks see of it."""

from jengine.train.compiles import COMPILES as COMPILES
from jengine.train.context import StepContext as StepContext
from jengine.train.flops import count_flops as count_flops
from jengine.train.losses import total_loss as total_loss
from jengine.train.replay import Findings as Findings
from jengine.train.replay import replay_step as replay_step
from jengine.train.state import TrainState as TrainState
from jengine.train.state import create_train_state as create_train_state
from jengine.train.step import build_eval_step as build_eval_step
from jengine.train.step import build_train_step as build_train_step
from jengine.train.trace_once import RetraceError as RetraceError
from jengine.train.trace_once import TraceOnce as TraceOnce
from jengine.train.trace_once import check_retrace as check_retrace
from jengine.train.traced_hooks import hook_names as hook_names
