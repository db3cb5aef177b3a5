"""One run from start to end: the Runner, its loops, resuming, and the end of a run.

`Runner.from_cfg(cfg).train()` is all that most people need. Imports the rooms up to `hooks`.
"""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.runner.eval_loops import TestLoop as TestLoop
from jengine.runner.eval_loops import ValLoop as ValLoop
from jengine.runner.loops import EpochBasedTrainLoop as EpochBasedTrainLoop
from jengine.runner.loops import IterBasedTrainLoop as IterBasedTrainLoop
from jengine.runner.runner import Runner as Runner

provides = {
    "names": dict.fromkeys(
        ("DefaultHooks", "EvalCfg", "EvaluationCfg", "LoaderCfg", "OptimWrapperCfg", "TrainCfg"),
        "jengine.runner.sections",
    )
}
__getattr__, __dir__ = _lazy_names(__name__, provides)
