"""Place the arrays of a run on its devices, and compile its step for them."""

from jengine.sharding.collectives import Collective as Collective
from jengine.sharding.collectives import find_collectives as find_collectives
from jengine.sharding.collectives import traffic as traffic
from jengine.sharding.data_parallel import DataParallel as DataParallel
from jengine.sharding.hlo import Operation as Operation
from jengine.sharding.hlo import Program as Program
from jengine.sharding.mesh import DataShard as DataShard
from jengine.sharding.mesh import build_mesh as build_mesh
from jengine.sharding.pjit import Pjit as Pjit
from jengine.sharding.pjit import default_strategy as default_strategy
from jengine.sharding.placement import Placement as Placement
from jengine.sharding.replica_axis import convert_replica_axis as convert_replica_axis
from jengine.sharding.replica_axis import convert_replica_axis_structs as convert_replica_axis_structs
from jengine.sharding.replica_axis import gather_replicas as gather_replicas
from jengine.sharding.replica_axis import select_replica as select_replica
from jengine.sharding.strategy import DispatchLimiter as DispatchLimiter
from jengine.sharding.strategy import SingleDevice as SingleDevice
from jengine.sharding.strategy import Strategy as Strategy
