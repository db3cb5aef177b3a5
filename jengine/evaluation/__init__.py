"""Evaluation: metrics as sums on the device, and an evaluator that combines several metrics."""

from jengine.evaluation.accuracy import Accuracy as Accuracy
from jengine.evaluation.adapter import MetricAdapter as MetricAdapter
from jengine.evaluation.evaluator import Evaluator as Evaluator
from jengine.evaluation.evaluator import EvaluatorState as EvaluatorState
from jengine.evaluation.evaluator import build_evaluator as build_evaluator
from jengine.evaluation.mean_loss import MeanLoss as MeanLoss
from jengine.evaluation.metric import BaseMetric as BaseMetric
from jengine.evaluation.metric import HostMetric as HostMetric
from jengine.evaluation.metric import example_mask as example_mask
