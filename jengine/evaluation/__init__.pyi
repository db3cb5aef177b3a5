# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.evaluation.accuracy import Accuracy as Accuracy
from jengine.evaluation.evaluator import Evaluator as Evaluator
from jengine.evaluation.evaluator import build_evaluator as build_evaluator
from jengine.evaluation.evaluator import get_metric_value as get_metric_value
from jengine.evaluation.mean_loss import MeanLoss as MeanLoss
from jengine.evaluation.metric import BaseMetric as BaseMetric
from jengine.evaluation.metric import HostMetric as HostMetric
from jengine.evaluation.metric import example_mask as example_mask
