"""Devices: where a run's arrays live and how its step is compiled."""

from jengine.parallel.strategy import InFlight as InFlight
from jengine.parallel.strategy import SingleDevice as SingleDevice
