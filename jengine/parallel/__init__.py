"""Devices: where a run's arrays live and how its step is compiled."""

from jengine.parallel.mesh import build_mesh as build_mesh
from jengine.parallel.pjit import Pjit as Pjit
from jengine.parallel.pjit import default_strategy as default_strategy
from jengine.parallel.placement import Placement as Placement
from jengine.parallel.strategy import InFlight as InFlight
from jengine.parallel.strategy import SingleDevice as SingleDevice
