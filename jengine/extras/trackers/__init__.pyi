# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.trackers.aim import AimVisBackend as AimVisBackend
from jengine.extras.trackers.clearml import ClearMLVisBackend as ClearMLVisBackend
from jengine.extras.trackers.comet import CometVisBackend as CometVisBackend
from jengine.extras.trackers.csv_file import CSVVisBackend as CSVVisBackend
from jengine.extras.trackers.mlflow import MLflowVisBackend as MLflowVisBackend
from jengine.extras.trackers.run_backend import RunVisBackend as RunVisBackend
from jengine.extras.trackers.trackio import TrackioVisBackend as TrackioVisBackend
from jengine.extras.trackers.wandb import WandbVisBackend as WandbVisBackend
