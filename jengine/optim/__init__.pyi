# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.optimizers.amp import AmpOptimWrapper as AmpOptimWrapper
from jengine.optim import optimizers as optimizers
from jengine.optim import param_groups as param_groups
from jengine.optim import schedules as schedules
from jengine.optim import transforms as transforms
from jengine.optim.optimizers.adam import Adam as Adam
from jengine.optim.optimizers.adam import AdamW as AdamW
from jengine.optim.optimizers.optax_optimizers import from_optax as from_optax
from jengine.optim.optimizers.optimizer import Optimizer as Optimizer
from jengine.optim.optimizers.sgd import SGD as SGD
from jengine.optim.param_groups.constructor import DefaultOptimWrapperConstructor as DefaultOptimWrapperConstructor
from jengine.optim.param_groups.modules import Module as Module
from jengine.optim.param_groups.modules import Parameter as Parameter
from jengine.optim.param_groups.param_group import ParamGroup as ParamGroup
from jengine.optim.wrapper import OptimWrapper as OptimWrapper
from jengine.optim.wrapper_builder import build_optim_wrapper as build_optim_wrapper
from jengine.optim.wrapper_builder import check_optim_wrapper as check_optim_wrapper
from jengine.optim.wrapper_dict import OptimWrapperDict as OptimWrapperDict
