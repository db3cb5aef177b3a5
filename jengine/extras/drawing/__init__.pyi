# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.drawing.canvas import Canvas as Canvas
from jengine.extras.drawing.local_visualizer import LocalVisualizer as LocalVisualizer
from jengine.extras.drawing.naive_visualization import NaiveVisualizationHook as NaiveVisualizationHook
