# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.serving.dump import DumpResults as DumpResults
from jengine.extras.serving.inferencer import BaseInferencer as BaseInferencer
from jengine.extras.serving.jax_export import export_model as export_model
from jengine.extras.serving.loaded_model import LoadedModel as LoadedModel
from jengine.extras.serving.loaded_model import load_model as load_model
from jengine.extras.serving.prepare_tta import PrepareTTAHook as PrepareTTAHook
from jengine.extras.serving.tta import BaseTTAModel as BaseTTAModel
from jengine.extras.serving.tta_runner import build_runner_with_tta as build_runner_with_tta
