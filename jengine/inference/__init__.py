"""Models after training: loaded from a checkpoint, exported, or with predictions for any data."""

from jengine.inference.inferencer import BaseInferencer as BaseInferencer
from jengine.inference.jax_export import export_model as export_model
from jengine.inference.loaded_model import LoadedModel as LoadedModel
from jengine.inference.loaded_model import load_model as load_model
