# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.replicas.data_parallel import DataParallel as DataParallel
from jengine.extras.replicas.data_parallel import Replica as Replica
from jengine.extras.replicas.diloco import DiLoCo as DiLoCo
from jengine.extras.replicas.sync_buffers import SyncBuffersHook as SyncBuffersHook
