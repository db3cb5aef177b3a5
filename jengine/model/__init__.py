"""Models as pure functions, with adapters for Linen modules, NNX modules and plain functions."""

from jengine.model.attention import attend as attend
from jengine.model.autocast import autocast as autocast
from jengine.model.functional import FunctionalModel as FunctionalModel
from jengine.model.labels import require_class_indices as require_class_indices
from jengine.model.linen import LinenModel as LinenModel
from jengine.model.lora import LoRA as LoRA
from jengine.model.losses import CrossEntropy as CrossEntropy
from jengine.model.losses import MeanSquaredError as MeanSquaredError
from jengine.model.losses import SwitchedLoss as SwitchedLoss
from jengine.model.mixture import MixtureOfExperts as MixtureOfExperts
from jengine.model.model import FROZEN as FROZEN
from jengine.model.model import Model as Model
from jengine.model.networks import SmallCNN as SmallCNN
from jengine.model.networks import SmallViT as SmallViT
from jengine.model.nnx import NnxModel as NnxModel
from jengine.model.precision import CastModel as CastModel
from jengine.model.precision import Precision as Precision
from jengine.model.precision import get_precision as get_precision
from jengine.model.prediction import predict_with_key as predict_with_key
from jengine.model.prediction import prediction_key as prediction_key
from jengine.model.preprocessed import PreprocessedModel as PreprocessedModel
from jengine.model.transformer import TransformerLM as TransformerLM
from jengine.model.transformer_nnx import nnx_transformer as nnx_transformer
from jengine.model.transformer_nnx import split_transformer as split_transformer
from jengine.model.tta import BaseTTAModel as BaseTTAModel
from jengine.model.tta import get_model as get_model
