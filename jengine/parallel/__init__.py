"""Devices and processes: where arrays are, how the step is compiled for them, who computes.

`Pjit` and `SingleDevice` are the strategies, with those of the extra `replicas`; `get_processes`
exchanges values between processes. Imports the rooms up to `optim`.
"""

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

provides = {  # imported on use, as what extras provide
    "STRATEGIES": {
        "Pjit": "jengine.parallel.pjit",
    },
    "names": {
        "convert_replica_axis": "jengine.parallel.replica_axis",
        "convert_replica_axis_structs": "jengine.parallel.replica_axis",
        "gather_replicas": "jengine.parallel.replica_axis",
        "select_replica": "jengine.parallel.replica_axis",
    },
}
__getattr__, __dir__ = _lazy_names(__name__, provides)
