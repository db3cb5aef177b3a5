"""Metrics over batches and processes, and the evaluator that combines them.

Subclass `BaseMetric` for a jitted metric and `HostMetric` for one on the host. Imports the rooms
up to `train`.
"""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.evaluation.evaluator import Evaluator as Evaluator
from jengine.evaluation.evaluator import build_evaluator as build_evaluator
from jengine.evaluation.evaluator import get_metric_value as get_metric_value
from jengine.evaluation.metric import BaseMetric as BaseMetric
from jengine.evaluation.metric import HostMetric as HostMetric
from jengine.evaluation.metric import example_mask as example_mask

provides = {  # imported on use, as what extras provide
    "METRICS": {
        "Accuracy": "jengine.evaluation.accuracy",
        "MeanLoss": "jengine.evaluation.mean_loss",
    },
}
__getattr__, __dir__ = _lazy_names(__name__, provides)
