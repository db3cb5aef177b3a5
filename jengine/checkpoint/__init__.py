"""Save and restore checkpoints: written in the background, complete or absent, readable without the config."""

from jengine.checkpoint.checkpointer import Checkpointer as Checkpointer
from jengine.checkpoint.checkpointer import CheckpointSaveError as CheckpointSaveError
from jengine.checkpoint.export import export_params as export_params
from jengine.checkpoint.export import import_batch_stats as import_batch_stats
from jengine.checkpoint.export import import_params as import_params
from jengine.checkpoint.layout import CorruptCheckpointError as CorruptCheckpointError
from jengine.checkpoint.layout import find_latest as find_latest
from jengine.checkpoint.layout import list_checkpoints as list_checkpoints
from jengine.checkpoint.layout import read_meta as read_meta
from jengine.checkpoint.layout import resolve as resolve
from jengine.checkpoint.lock import WorkDirLock as WorkDirLock
from jengine.checkpoint.lock import WorkDirLockedError as WorkDirLockedError
from jengine.checkpoint.publish import publish as publish
from jengine.checkpoint.report import CheckpointMismatchError as CheckpointMismatchError
from jengine.checkpoint.report import LoadReport as LoadReport
from jengine.checkpoint.restore import Checkpoint as Checkpoint
from jengine.checkpoint.restore import list_arrays as list_arrays
from jengine.checkpoint.restore import load as load
from jengine.checkpoint.restore import load_params as load_params
from jengine.checkpoint.restore import restore as restore
from jengine.checkpoint.retention import infer_rule as infer_rule
from jengine.checkpoint.retention import is_better as is_better
from jengine.checkpoint.retention import pick_metric as pick_metric
