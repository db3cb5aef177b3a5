# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.checkpoint.arrays import check_storable as check_storable
from jengine.checkpoint.checkpointer import CheckpointSaveError as CheckpointSaveError
from jengine.checkpoint.checkpointer import Checkpointer as Checkpointer
from jengine.checkpoint.layout import CorruptCheckpointError as CorruptCheckpointError
from jengine.checkpoint.layout import find_checkpoint as find_checkpoint
from jengine.checkpoint.layout import find_latest as find_latest
from jengine.checkpoint.layout import list_checkpoints as list_checkpoints
from jengine.checkpoint.layout import read_meta as read_meta
from jengine.checkpoint.lock import WorkDirLock as WorkDirLock
from jengine.checkpoint.lock_holder import WorkDirLockedError as WorkDirLockedError
from jengine.checkpoint.report import LoadReport as LoadReport
from jengine.checkpoint.restore import Checkpoint as Checkpoint
from jengine.checkpoint.restore import list_arrays as list_arrays
from jengine.checkpoint.restore import load as load
from jengine.checkpoint.restore import load_params as load_params
from jengine.checkpoint.restore import restore as restore
from jengine.config.errors import CheckpointMismatchError as CheckpointMismatchError
from jengine.extras.weights.best import find_best_checkpoint as find_best_checkpoint
from jengine.extras.weights.best import list_best_checkpoints as list_best_checkpoints
from jengine.extras.weights.published_copy import publish as publish
