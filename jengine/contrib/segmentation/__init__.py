"""Support semantic segmentation as MMSegmentation does: its metric and its visualization hook."""

from jengine.contrib.segmentation.iou_metric import IoUMetric as IoUMetric
from jengine.contrib.segmentation.visualization_hook import SegVisualizationHook as SegVisualizationHook
