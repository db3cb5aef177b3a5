# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.segmentation.visualization_hook import SegVisualizationHook as SegVisualizationHook
