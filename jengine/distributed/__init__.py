"""Processes that train together: connected through JAX's runtime, and ended together."""

from jengine.distributed.dist import all_gather as all_gather
from jengine.distributed.dist import all_gather_object as all_gather_object
from jengine.distributed.dist import all_reduce as all_reduce
from jengine.distributed.dist import all_reduce_dict as all_reduce_dict
from jengine.distributed.dist import barrier as barrier
from jengine.distributed.dist import broadcast as broadcast
from jengine.distributed.dist import broadcast_object_list as broadcast_object_list
from jengine.distributed.dist import collect_results as collect_results
from jengine.distributed.dist import gather_object as gather_object
from jengine.distributed.dist import get_dist_info as get_dist_info
from jengine.distributed.dist import get_rank as get_rank
from jengine.distributed.dist import get_world_size as get_world_size
from jengine.distributed.dist import is_distributed as is_distributed
from jengine.distributed.dist import is_main_process as is_main_process
from jengine.distributed.dist import master_only as master_only
from jengine.distributed.dist import sync_random_seed as sync_random_seed
from jengine.distributed.failures import ProcessError as ProcessError
from jengine.distributed.launch import launch as launch
from jengine.distributed.processes import ProcessMismatchError as ProcessMismatchError
from jengine.distributed.processes import all_gather_objects as all_gather_objects
from jengine.distributed.processes import assert_equal_across_processes as assert_equal_across_processes
from jengine.distributed.processes import get_processes as get_processes
