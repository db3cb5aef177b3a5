# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.metrics.adapter import MetricAdapter as MetricAdapter
from jengine.extras.metrics.classification import CalibrationError as CalibrationError
from jengine.extras.metrics.classification import ConfusionMatrix as ConfusionMatrix
from jengine.extras.metrics.classification import PrecisionRecallF1 as PrecisionRecallF1
from jengine.extras.metrics.language import BLEU as BLEU
from jengine.extras.metrics.language import BitsPerByte as BitsPerByte
from jengine.extras.metrics.language import Perplexity as Perplexity
from jengine.extras.metrics.ranking import AUROC as AUROC
from jengine.extras.metrics.ranking import AveragePrecision as AveragePrecision
from jengine.extras.metrics.regression import MeanAbsoluteError as MeanAbsoluteError
from jengine.extras.metrics.regression import MeanSquaredError as MeanSquaredError
from jengine.extras.metrics.regression import MeanSquaredErrorMetric as MeanSquaredErrorMetric
from jengine.extras.metrics.regression import R2Score as R2Score
from jengine.extras.metrics.segmentation import IoUMetric as IoUMetric
