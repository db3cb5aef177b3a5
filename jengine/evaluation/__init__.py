"""Evaluation: metrics, and an evaluator that combines several of them."""

from jengine.evaluation.accuracy import Accuracy as Accuracy
from jengine.evaluation.adapter import MetricAdapter as MetricAdapter
from jengine.evaluation.classification import CalibrationError as CalibrationError
from jengine.evaluation.classification import ConfusionMatrix as ConfusionMatrix
from jengine.evaluation.classification import PrecisionRecallF1 as PrecisionRecallF1
from jengine.evaluation.dump import DumpResults as DumpResults
from jengine.evaluation.evaluator import Evaluator as Evaluator
from jengine.evaluation.evaluator import build_evaluator as build_evaluator
from jengine.evaluation.evaluator import get_metric_value as get_metric_value
from jengine.evaluation.language import BLEU as BLEU
from jengine.evaluation.language import BitsPerByte as BitsPerByte
from jengine.evaluation.language import Perplexity as Perplexity
from jengine.evaluation.mean_loss import MeanLoss as MeanLoss
from jengine.evaluation.metric import BaseMetric as BaseMetric
from jengine.evaluation.metric import HostMetric as HostMetric
from jengine.evaluation.metric import example_mask as example_mask
from jengine.evaluation.ranking import AUROC as AUROC
from jengine.evaluation.ranking import AveragePrecision as AveragePrecision
from jengine.evaluation.regression import MeanAbsoluteError as MeanAbsoluteError
from jengine.evaluation.regression import MeanSquaredErrorMetric as MeanSquaredErrorMetric
from jengine.evaluation.regression import R2Score as R2Score
