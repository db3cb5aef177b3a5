"""Export optimizers, optimizer wrappers and their constructors."""

from jengine.optim import optimizers as optimizers
from jengine.optim import schedules as schedules
from jengine.optim import transforms as transforms
from jengine.optim.amp import AmpOptimWrapper as AmpOptimWrapper
from jengine.optim.build import build_optim_wrapper as build_optim_wrapper
from jengine.optim.build import check_optim_wrapper as check_optim_wrapper
from jengine.optim.optimizers import ASGD as ASGD
from jengine.optim.optimizers import LARS as LARS
from jengine.optim.optimizers import SGD as SGD
from jengine.optim.optimizers import Adadelta as Adadelta
from jengine.optim.optimizers import Adafactor as Adafactor
from jengine.optim.optimizers import Adagrad as Adagrad
from jengine.optim.optimizers import Adam as Adam
from jengine.optim.optimizers import Adamax as Adamax
from jengine.optim.optimizers import AdamW as AdamW
from jengine.optim.optimizers import Adan as Adan
from jengine.optim.optimizers import Lamb as Lamb
from jengine.optim.optimizers import Lion as Lion
from jengine.optim.optimizers import Muon as Muon
from jengine.optim.optimizers import NAdam as NAdam
from jengine.optim.optimizers import RAdam as RAdam
from jengine.optim.optimizers import RMSprop as RMSprop
from jengine.optim.optimizers import Rprop as Rprop
from jengine.optim.optimizers.optimizer import Optimizer as Optimizer
from jengine.optim.param_groups.constructor import DefaultOptimWrapperConstructor as DefaultOptimWrapperConstructor
from jengine.optim.param_groups.layer_decay import (
    LearningRateDecayOptimizerConstructor as LearningRateDecayOptimizerConstructor,
)
from jengine.optim.param_groups.layer_decay import (
    LearningRateDecayOptimWrapperConstructor as LearningRateDecayOptimWrapperConstructor,
)
from jengine.optim.param_groups.modules import Module as Module
from jengine.optim.param_groups.modules import Parameter as Parameter
from jengine.optim.param_groups.multi_constructor import MultiOptimWrapperConstructor as MultiOptimWrapperConstructor
from jengine.optim.param_groups.param_group import ParamGroup as ParamGroup
from jengine.optim.wrapper import OptimWrapper as OptimWrapper
from jengine.optim.wrapper import OptState as OptState
from jengine.optim.wrapper_dict import OptimWrapperDict as OptimWrapperDict
