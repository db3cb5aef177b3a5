"""Devices: where a run's arrays live and how its step is compiled."""

from jengine.parallel.agreement import ShutdownConsensus as ShutdownConsensus
from jengine.parallel.collectives import Collective as Collective
from jengine.parallel.collectives import collectives as collectives
from jengine.parallel.collectives import traffic as traffic
from jengine.parallel.data_parallel import DataParallel as DataParallel
from jengine.parallel.failures import ProcessError as ProcessError
from jengine.parallel.launch import LAUNCHERS as LAUNCHERS
from jengine.parallel.launch import launch as launch
from jengine.parallel.mesh import build_mesh as build_mesh
from jengine.parallel.pjit import Pjit as Pjit
from jengine.parallel.pjit import default_strategy as default_strategy
from jengine.parallel.placement import Placement as Placement
from jengine.parallel.processes import ProcessMismatchError as ProcessMismatchError
from jengine.parallel.processes import assert_equal_across_processes as assert_equal_across_processes
from jengine.parallel.processes import get_processes as get_processes
from jengine.parallel.replica_axis import convert_replica_axis as convert_replica_axis
from jengine.parallel.rows import all_gather_objects as all_gather_objects
from jengine.parallel.rows import process_local_batch as process_local_batch
from jengine.parallel.strategy import DispatchLimiter as DispatchLimiter
from jengine.parallel.strategy import SingleDevice as SingleDevice
from jengine.parallel.strategy import Strategy as Strategy
