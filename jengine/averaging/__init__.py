"""Parameter averages over training: exponential, uniform, or with an annealed or scheduled weight."""

from jengine.averaging.average import AVERAGES as AVERAGES
from jengine.averaging.average import Average as Average
from jengine.averaging.average import AverageState as AverageState
from jengine.averaging.kinds import CosineEMA as CosineEMA
from jengine.averaging.kinds import ExpMomentumEMA as ExpMomentumEMA
from jengine.averaging.kinds import ExponentialMovingAverage as ExponentialMovingAverage
from jengine.averaging.kinds import MomentumAnnealingEMA as MomentumAnnealingEMA
from jengine.averaging.kinds import StochasticWeightAverage as StochasticWeightAverage
