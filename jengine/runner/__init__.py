"""Runner and loops; the names from `jengine.inference` are here as well."""

import importlib
from typing import TYPE_CHECKING, Any

from jengine.runner.eval_loops import TestLoop as TestLoop
from jengine.runner.eval_loops import ValLoop as ValLoop
from jengine.runner.loops import EpochBasedTrainLoop as EpochBasedTrainLoop
from jengine.runner.loops import IterBasedTrainLoop as IterBasedTrainLoop
from jengine.runner.runner import Runner as Runner

if TYPE_CHECKING:
    from jengine.inference import LoadedModel as LoadedModel
    from jengine.inference import build_runner_with_tta as build_runner_with_tta
    from jengine.inference import export_model as export_model
    from jengine.inference import load_model as load_model


def __getattr__(name: str) -> Any:
    # At the first use, because `jengine.inference` imports modules from this package
    if name in ("LoadedModel", "build_runner_with_tta", "export_model", "load_model"):
        return getattr(importlib.import_module("jengine.inference"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
