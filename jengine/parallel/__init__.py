"""Devices and processes: where arrays are, how the step is compiled for them, who computes.

`Pjit`, `DataParallel` and `SingleDevice` are the strategies; `launch` starts processes and the
functions of `dist` exchange values between them. Imports the rooms up to `optim`.
"""

from typing import TYPE_CHECKING

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.parallel.failures import ProcessError as ProcessError
from jengine.parallel.mesh import DataShard as DataShard
from jengine.parallel.mesh import build_mesh as build_mesh
from jengine.parallel.placement import Placement as Placement
from jengine.parallel.processes import ProcessMismatchError as ProcessMismatchError
from jengine.parallel.processes import all_gather_objects as all_gather_objects
from jengine.parallel.processes import (
    assert_equal_across_processes as assert_equal_across_processes,
)
from jengine.parallel.processes import get_processes as get_processes
from jengine.parallel.strategy import DispatchLimiter as DispatchLimiter
from jengine.parallel.strategy import SingleDevice as SingleDevice
from jengine.parallel.strategy import Strategy as Strategy
from jengine.parallel.strategy import default_strategy as default_strategy

if TYPE_CHECKING:
    from jengine.parallel.data_parallel import DataParallel as DataParallel
    from jengine.parallel.dist import all_gather as all_gather
    from jengine.parallel.dist import all_gather_object as all_gather_object
    from jengine.parallel.dist import all_reduce as all_reduce
    from jengine.parallel.dist import all_reduce_dict as all_reduce_dict
    from jengine.parallel.dist import barrier as barrier
    from jengine.parallel.dist import broadcast as broadcast
    from jengine.parallel.dist import broadcast_object_list as broadcast_object_list
    from jengine.parallel.dist import collect_results as collect_results
    from jengine.parallel.dist import gather_object as gather_object
    from jengine.parallel.dist import get_dist_info as get_dist_info
    from jengine.parallel.dist import get_rank as get_rank
    from jengine.parallel.dist import get_world_size as get_world_size
    from jengine.parallel.dist import is_distributed as is_distributed
    from jengine.parallel.dist import is_main_process as is_main_process
    from jengine.parallel.dist import master_only as master_only
    from jengine.parallel.dist import sync_random_seed as sync_random_seed
    from jengine.parallel.launchers import launch as launch
    from jengine.parallel.pjit import Pjit as Pjit
    from jengine.parallel.replica_axis import convert_replica_axis as convert_replica_axis
    from jengine.parallel.replica_axis import (
        convert_replica_axis_structs as convert_replica_axis_structs,
    )
    from jengine.parallel.replica_axis import gather_replicas as gather_replicas
    from jengine.parallel.replica_axis import select_replica as select_replica

provides = {  # imported on use, as what extras provide
    "STRATEGIES": {
        "DataParallel": "jengine.parallel.data_parallel",
        "Pjit": "jengine.parallel.pjit",
        "Replica": "jengine.parallel.data_parallel",
    },
    "names": {
        "all_gather": "jengine.parallel.dist",
        "all_gather_object": "jengine.parallel.dist",
        "all_reduce": "jengine.parallel.dist",
        "all_reduce_dict": "jengine.parallel.dist",
        "barrier": "jengine.parallel.dist",
        "broadcast": "jengine.parallel.dist",
        "broadcast_object_list": "jengine.parallel.dist",
        "collect_results": "jengine.parallel.dist",
        "convert_replica_axis": "jengine.parallel.replica_axis",
        "convert_replica_axis_structs": "jengine.parallel.replica_axis",
        "gather_object": "jengine.parallel.dist",
        "gather_replicas": "jengine.parallel.replica_axis",
        "get_dist_info": "jengine.parallel.dist",
        "get_rank": "jengine.parallel.dist",
        "get_world_size": "jengine.parallel.dist",
        "is_distributed": "jengine.parallel.dist",
        "is_main_process": "jengine.parallel.dist",
        "launch": "jengine.parallel.launchers",
        "master_only": "jengine.parallel.dist",
        "select_replica": "jengine.parallel.replica_axis",
        "sync_random_seed": "jengine.parallel.dist",
    },
}
__getattr__, __dir__ = _lazy_names(__name__, provides)
