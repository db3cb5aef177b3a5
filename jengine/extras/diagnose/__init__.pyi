# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.diagnose.class_count import ClassNumCheckHook as ClassNumCheckHook
from jengine.extras.diagnose.class_count import NumClassCheckHook as NumClassCheckHook
from jengine.extras.diagnose.inspect_hook import HistogramHook as HistogramHook
from jengine.extras.diagnose.inspect_hook import InspectHook as InspectHook
from jengine.extras.diagnose.invalid_loss import CheckInvalidLossHook as CheckInvalidLossHook
from jengine.extras.diagnose.memory import EmptyCacheHook as EmptyCacheHook
from jengine.extras.diagnose.memory import MemoryProfilerHook as MemoryProfilerHook
from jengine.extras.diagnose.numerics_guard import NumericsGuardHook as NumericsGuardHook
from jengine.extras.diagnose.profiler import ProfilerHook as ProfilerHook
from jengine.extras.diagnose.replay import Findings as Findings
from jengine.extras.diagnose.replay import replay_step as replay_step
