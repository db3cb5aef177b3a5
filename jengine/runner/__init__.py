"""Runner and loops; the names from `jengine.inference` are here as well."""

from jengine.inference.jax_export import export_model as export_model
from jengine.inference.loaded_model import LoadedModel as LoadedModel
from jengine.inference.loaded_model import load_model as load_model
from jengine.runner.eval_loops import TestLoop as TestLoop
from jengine.runner.eval_loops import ValLoop as ValLoop
from jengine.runner.loops import EpochBasedTrainLoop as EpochBasedTrainLoop
from jengine.runner.loops import IterBasedTrainLoop as IterBasedTrainLoop
from jengine.runner.runner import Runner as Runner
from jengine.runner.tta import build_runner_with_tta as build_runner_with_tta
