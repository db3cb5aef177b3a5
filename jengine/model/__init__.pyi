# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.augment.preprocessed import PreprocessedModel as PreprocessedModel
from jengine.model.autocast import autocast as autocast
from jengine.model.functional import FunctionalModel as FunctionalModel
from jengine.model.labels import require_class_indices as require_class_indices
from jengine.model.linen import LinenModel as LinenModel
from jengine.model.losses import CrossEntropy as CrossEntropy
from jengine.model.losses import MeanSquaredError as MeanSquaredError
from jengine.model.model import FROZEN as FROZEN
from jengine.model.model import Model as Model
from jengine.model.model import get_model as get_model
from jengine.model.model import predict_with_key as predict_with_key
from jengine.model.model import prediction_key as prediction_key
from jengine.model.nnx import NnxModel as NnxModel
from jengine.model.precision import CastModel as CastModel
from jengine.model.precision import Precision as Precision
from jengine.model.precision import build_model as build_model
from jengine.model.precision import get_precision as get_precision
from jengine.model.roles import Role as Role
from jengine.model.roles import parameter_roles as parameter_roles
