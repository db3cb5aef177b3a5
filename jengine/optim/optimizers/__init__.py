"""The optimizers, one family a file. Importing this package registers them."""

from jengine.optim.optimizers.adam import Adam as Adam
from jengine.optim.optimizers.adam import AdamW as AdamW
from jengine.optim.optimizers.optax_named import from_optax as from_optax
from jengine.optim.optimizers.sgd import SGD as SGD
