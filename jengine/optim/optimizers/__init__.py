"""The optimizers, one family a file. Importing this package registers them."""

from jengine.optim.optimizers.adadelta import Adadelta as Adadelta
from jengine.optim.optimizers.adafactor import Adafactor as Adafactor
from jengine.optim.optimizers.adagrad import Adagrad as Adagrad
from jengine.optim.optimizers.adam import Adam as Adam
from jengine.optim.optimizers.adam import AdamW as AdamW
from jengine.optim.optimizers.adamax import Adamax as Adamax
from jengine.optim.optimizers.adan import Adan as Adan
from jengine.optim.optimizers.asgd import ASGD as ASGD
from jengine.optim.optimizers.bert import BertAdam as BertAdam
from jengine.optim.optimizers.bert import BertAdam1 as BertAdam1
from jengine.optim.optimizers.bert import TansformerAdamW as TansformerAdamW
from jengine.optim.optimizers.lamb import Lamb as Lamb
from jengine.optim.optimizers.lars import LARS as LARS
from jengine.optim.optimizers.lion import Lion as Lion
from jengine.optim.optimizers.muon import Muon as Muon
from jengine.optim.optimizers.nadam import NAdam as NAdam
from jengine.optim.optimizers.optax_named import from_optax as from_optax
from jengine.optim.optimizers.radam import RAdam as RAdam
from jengine.optim.optimizers.refused import LBFGS as LBFGS
from jengine.optim.optimizers.refused import SparseAdam as SparseAdam
from jengine.optim.optimizers.rmsprop import RMSprop as RMSprop
from jengine.optim.optimizers.rprop import Rprop as Rprop
from jengine.optim.optimizers.sgd import SGD as SGD
