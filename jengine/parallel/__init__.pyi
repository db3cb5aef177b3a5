# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.cloud.launchers import launch as launch
from jengine.extras.mmengine.dist import all_gather as all_gather
from jengine.extras.mmengine.dist import all_gather_object as all_gather_object
from jengine.extras.mmengine.dist import all_reduce as all_reduce
from jengine.extras.mmengine.dist import all_reduce_dict as all_reduce_dict
from jengine.extras.mmengine.dist import barrier as barrier
from jengine.extras.mmengine.dist import broadcast as broadcast
from jengine.extras.mmengine.dist import broadcast_object_list as broadcast_object_list
from jengine.extras.mmengine.dist import collect_results as collect_results
from jengine.extras.mmengine.dist import gather_object as gather_object
from jengine.extras.mmengine.dist import get_dist_info as get_dist_info
from jengine.extras.mmengine.dist import get_rank as get_rank
from jengine.extras.mmengine.dist import get_world_size as get_world_size
from jengine.extras.mmengine.dist import is_distributed as is_distributed
from jengine.extras.mmengine.dist import is_main_process as is_main_process
from jengine.extras.mmengine.dist import master_only as master_only
from jengine.extras.mmengine.dist import sync_random_seed as sync_random_seed
from jengine.parallel.data_parallel import DataParallel as DataParallel
from jengine.parallel.data_parallel import Replica as Replica
from jengine.parallel.failures import ProcessError as ProcessError
from jengine.parallel.mesh import DataShard as DataShard
from jengine.parallel.mesh import build_mesh as build_mesh
from jengine.parallel.pjit import Pjit as Pjit
from jengine.parallel.placement import Placement as Placement
from jengine.parallel.processes import ProcessMismatchError as ProcessMismatchError
from jengine.parallel.processes import all_gather_objects as all_gather_objects
from jengine.parallel.processes import assert_equal_across_processes as assert_equal_across_processes
from jengine.parallel.processes import get_processes as get_processes
from jengine.parallel.replica_axis import convert_replica_axis as convert_replica_axis
from jengine.parallel.replica_axis import convert_replica_axis_structs as convert_replica_axis_structs
from jengine.parallel.replica_axis import gather_replicas as gather_replicas
from jengine.parallel.replica_axis import select_replica as select_replica
from jengine.parallel.strategy import DispatchLimiter as DispatchLimiter
from jengine.parallel.strategy import SingleDevice as SingleDevice
from jengine.parallel.strategy import Strategy as Strategy
from jengine.parallel.strategy import default_strategy as default_strategy
from typing import Any

provides: dict[str, Any]
