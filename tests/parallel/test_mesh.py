"""Test which rows of a batch each process supplies, on meshes of stand-ins for devices."""

import dataclasses

import numpy as np
import pytest
from jax.sharding import Mesh

from jengine.parallel.mesh import DataShard, find_data_shard


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def make_mesh(shape, processes, axes=("data", "fsdp", "tensor")):
    devices = np.array([Device(i, process) for i, process in enumerate(processes)], dtype=object)
    return Mesh(devices.reshape(shape), axes)


@pytest.mark.parametrize(
    ("shape", "processes", "expected"),
    [
        ((4, 1, 1), [0, 0, 1, 1], [DataShard(0, 2, (0,)), DataShard(1, 2, (1,))]),
        ((1, 4, 1), [1, 1, 0, 0], [DataShard(1, 2, (0,)), DataShard(0, 2, (1,))]),  # rows decide, not process indices
        ((2, 1, 2), [0, 0, 1, 1], [DataShard(0, 2, (0,)), DataShard(1, 2, (1,))]),
        ((2, 1, 2), [0, 1, 0, 1], [DataShard(0, 1, (0, 1))] * 2),  # each process holds all rows
        ((1, 1, 4), [0, 1, 2, 3], [DataShard(0, 1, (0, 1, 2, 3))] * 4),
        ((2, 1, 2), [0, 1, 2, 3], [DataShard(0, 2, (0, 1))] * 2 + [DataShard(1, 2, (2, 3))] * 2),
        ((1, 2, 2), [3, 2, 1, 0], [DataShard(1, 2, (0, 1))] * 2 + [DataShard(0, 2, (2, 3))] * 2),
    ],
)
def test_processes_supply_the_rows_that_their_devices_hold(shape, processes, expected):
    mesh = make_mesh(shape, processes)
    assert [find_data_shard(mesh, process) for process in sorted(set(processes))] == expected
