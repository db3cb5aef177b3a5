"""Visualizer, which sends scalars, images and the config to backends."""

from jengine.visualization.aim import AimVisBackend as AimVisBackend
from jengine.visualization.backend import BaseVisBackend as BaseVisBackend
from jengine.visualization.canvas import Canvas as Canvas
from jengine.visualization.clearml import ClearMLVisBackend as ClearMLVisBackend
from jengine.visualization.comet import CometVisBackend as CometVisBackend
from jengine.visualization.convert import Histogram as Histogram
from jengine.visualization.files import CSVVisBackend as CSVVisBackend
from jengine.visualization.files import LocalVisBackend as LocalVisBackend
from jengine.visualization.local_visualizer import LocalVisualizer as LocalVisualizer
from jengine.visualization.mlflow import MLflowVisBackend as MLflowVisBackend
from jengine.visualization.tensorboard import TensorboardVisBackend as TensorboardVisBackend
from jengine.visualization.visualizer import Visualizer as Visualizer
from jengine.visualization.wandb import WandbVisBackend as WandbVisBackend
