"""Semantic segmentation in MMSegmentation's manner: metric and visualization hook."""

from jengine.contrib.segmentation.iou_metric import IoUMetric as IoUMetric
from jengine.contrib.segmentation.visualization_hook import SegVisualizationHook as SegVisualizationHook
