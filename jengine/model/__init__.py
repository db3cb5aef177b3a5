"""Models as three pure functions, `init`, `loss` and `predict`, with adapters that make them.

`LinenModel`, `NnxModel` and `FunctionalModel` adapt networks; `Precision` and `remat` change how
they are computed. Imports the rooms up to `data`.
"""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.model.autocast import autocast as autocast
from jengine.model.model import FROZEN as FROZEN
from jengine.model.model import Model as Model
from jengine.model.model import get_model as get_model
from jengine.model.model import predict_with_key as predict_with_key
from jengine.model.model import prediction_key as prediction_key
from jengine.model.precision import CastModel as CastModel
from jengine.model.precision import Precision as Precision
from jengine.model.precision import build_model as build_model
from jengine.model.precision import get_precision as get_precision
from jengine.model.roles import Role as Role
from jengine.model.roles import parameter_roles as parameter_roles

provides = {  # imported on use, as what extras provide
    "MODELS": {
        "CrossEntropy": "jengine.model.losses",
        "FunctionalModel": "jengine.model.functional",
        "LinenModel": "jengine.model.linen",
        "MeanSquaredError": "jengine.model.losses",
        "NnxModel": "jengine.model.nnx",
    },
    "names": {
        "require_class_indices": "jengine.model.labels",
    },
}
__getattr__, __dir__ = _lazy_names(__name__, provides)
