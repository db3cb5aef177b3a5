# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.runner.eval_loops import TestLoop as TestLoop
from jengine.runner.eval_loops import ValLoop as ValLoop
from jengine.runner.loops import EpochBasedTrainLoop as EpochBasedTrainLoop
from jengine.runner.loops import IterBasedTrainLoop as IterBasedTrainLoop
from jengine.runner.runner import Runner as Runner
from jengine.runner.sections import DefaultHooks as DefaultHooks
from jengine.runner.sections import EvalCfg as EvalCfg
from jengine.runner.sections import EvaluationCfg as EvaluationCfg
from jengine.runner.sections import LoaderCfg as LoaderCfg
from jengine.runner.sections import OptimWrapperCfg as OptimWrapperCfg
from jengine.runner.sections import TrainCfg as TrainCfg
