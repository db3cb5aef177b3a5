"""Processes that train together: connected through JAX's runtime, and ended together."""

from jengine.distributed.failures import ProcessError as ProcessError
from jengine.distributed.gather import all_gather_objects as all_gather_objects
from jengine.distributed.gather import process_local_batch as process_local_batch
from jengine.distributed.launch import LAUNCHERS as LAUNCHERS
from jengine.distributed.launch import launch as launch
from jengine.distributed.processes import ProcessMismatchError as ProcessMismatchError
from jengine.distributed.processes import assert_equal_across_processes as assert_equal_across_processes
from jengine.distributed.processes import get_processes as get_processes
