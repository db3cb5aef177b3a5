"""Export the optimizers, one family per module; importing this package registers them."""

from jengine.optim.optimizers.adafactor import Adafactor as Adafactor
from jengine.optim.optimizers.adagrad import Adadelta as Adadelta
from jengine.optim.optimizers.adagrad import Adagrad as Adagrad
from jengine.optim.optimizers.adam import Adam as Adam
from jengine.optim.optimizers.adam import Adamax as Adamax
from jengine.optim.optimizers.adam import AdamW as AdamW
from jengine.optim.optimizers.adam import NAdam as NAdam
from jengine.optim.optimizers.adam import RAdam as RAdam
from jengine.optim.optimizers.adan import Adan as Adan
from jengine.optim.optimizers.large_batch import LARS as LARS
from jengine.optim.optimizers.large_batch import Lamb as Lamb
from jengine.optim.optimizers.lion import Lion as Lion
from jengine.optim.optimizers.muon import Muon as Muon
from jengine.optim.optimizers.optax_optimizers import from_optax as from_optax
from jengine.optim.optimizers.rmsprop import RMSprop as RMSprop
from jengine.optim.optimizers.rmsprop import Rprop as Rprop
from jengine.optim.optimizers.sgd import ASGD as ASGD
from jengine.optim.optimizers.sgd import SGD as SGD
from jengine.optim.optimizers.unsupported import LBFGS as LBFGS
from jengine.optim.optimizers.unsupported import SparseAdam as SparseAdam
