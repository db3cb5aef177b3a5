"""Optimizers as optax chains: wrappers, parameter groups by rules, and schedules.

`build_optim_wrapper` makes an `OptimWrapper` for a model's parameters; schedules are functions of
the step. Imports the rooms up to `model`.
"""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.optim import optimizers as optimizers
from jengine.optim import schedules as schedules
from jengine.optim import transforms as transforms
from jengine.optim.optimizers.optax_optimizers import from_optax as from_optax
from jengine.optim.optimizers.optimizer import Optimizer as Optimizer
from jengine.optim.param_groups.constructor import (
    DefaultOptimWrapperConstructor as DefaultOptimWrapperConstructor,
)
from jengine.optim.param_groups.modules import Module as Module
from jengine.optim.param_groups.modules import Parameter as Parameter
from jengine.optim.param_groups.param_group import ParamGroup as ParamGroup
from jengine.optim.wrapper import OptimWrapper as OptimWrapper
from jengine.optim.wrapper_builder import build_optim_wrapper as build_optim_wrapper
from jengine.optim.wrapper_builder import check_optim_wrapper as check_optim_wrapper
from jengine.optim.wrapper_dict import OptimWrapperDict as OptimWrapperDict

provides = {  # imported on use, as what extras provide
    "OPTIMIZERS": {
        "Adam": "jengine.optim.optimizers.adam",
        "AdamW": "jengine.optim.optimizers.adam",
        "SGD": "jengine.optim.optimizers.sgd",
    },
}
__getattr__, __dir__ = _lazy_names(__name__, provides)
