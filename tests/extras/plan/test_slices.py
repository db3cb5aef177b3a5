"""Test how the devices of several slices are arranged in a mesh, with stand-ins for devices."""

import dataclasses
import itertools

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.extras.plan.plan_search import iterate_meshes
from jengine.parallel import build_mesh
from tests.refusals import check_refusal


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int = 0
    coords: tuple[int, ...] = ()
    platform: str = "cpu"
    device_kind: str = "cpu"
    core_on_chip: int = 0


def make_slices(count, shape=(4, 4, 1), kind="TPU v5 lite"):
    """Return the chips of TPU slices, four on each host."""
    places = list(itertools.product(range(count), *map(range, shape)))
    return [Device(i, i // 4, place[0], place[1:], "tpu", kind) for i, place in enumerate(places)]


def slice_indices(mesh):
    return np.vectorize(lambda device: device.slice_index)(mesh.devices)


def test_an_axis_crosses_slices_only_where_the_config_names_it():
    mesh = build_mesh(dict(data=-1, fsdp=16, slices=dict(data=2)), make_slices(2))
    assert dict(mesh.shape) == dict(data=2, fsdp=16, tensor=1)  # sizes include the slices
    np.testing.assert_array_equal(slice_indices(mesh)[:, :, 0], np.repeat([[0], [1]], 16, axis=1))
    mesh = build_mesh(dict(data=4, fsdp=16, slices=dict(data=2, fsdp=2)), make_slices(4))
    expected = np.block([[np.full((2, 8), 2 * i + j) for j in range(2)] for i in range(2)])
    np.testing.assert_array_equal(slice_indices(mesh)[:, :, 0], expected)


@pytest.mark.parametrize(
    ("mesh", "slices"), [(dict(data=8, fsdp=4), dict(data=2)), (dict(data=1, fsdp=-1), dict(fsdp=2)), ({}, {"data": 2})]
)
def test_without_slices_in_the_config_the_first_axis_that_they_divide_crosses_them(mesh, slices):
    chosen, named = build_mesh(mesh, make_slices(2)), build_mesh({**mesh, "slices": slices}, make_slices(2))
    assert chosen == named
    assert len(set(chosen.devices.flat)) == 32


@pytest.mark.parametrize(
    ("count", "shape", "kind"),
    [(1, (4, 4, 4), "TPU v5"), (2, (4, 4, 1), "TPU v5 lite"), (2, (4, 4, 1), "TPU v6 lite"), (4, (2, 2, 1), "TPU v5")],
)
def test_every_mesh_of_a_search_can_be_built(count, shape, kind):
    devices = make_slices(count, shape, kind)
    meshes = list(iterate_meshes(len(devices), has_tensor=True, slices=count))
    assert len(meshes) > 3
    for sizes in meshes:
        mesh = build_mesh(sizes, devices)
        assert set(mesh.devices.flat) == set(devices)
        assert sizes.get("slices", {}) == ({"data": count} if count > 1 else {})


def test_where_there_are_no_slices_processes_count_as_slices():
    devices = [Device(i, i % 2) for i in range(8)]
    mesh = build_mesh(dict(data=4, fsdp=2, slices=dict(data=2)), devices)
    assert [device.process_index for device in mesh.devices[:, 0, 0]] == [0, 0, 1, 1]
    assert list(build_mesh(dict(data=4, fsdp=2), devices).devices.flat) == devices
    with pytest.raises(
        ConfigError, match=r"number of processes, which count as slices on these devices, 2, got \{'fsd"
    ):
        build_mesh(dict(data=2, fsdp=4, slices=dict(fsdp=4)), devices)


@pytest.mark.parametrize(
    ("slices", "words"),
    [
        (dict(dta=2), ["mesh.slices", "got 'dta'", "did you mean 'data'"]),
        (dict(data=3), ["mesh.slices.data", "got 3"]),
        (dict(fsdp=0), ["mesh.slices.fsdp", "got 0"]),
        (dict(data=4), ["got {'data': 4}"]),
        ({}, ["got {}"]),
        (2, ["mesh.slices", "(data=2)", "got 2"]),
    ],
)
def test_slices_that_do_not_fit_are_refused(slices, words):
    check_refusal(lambda: build_mesh(dict(data=4, fsdp=8, slices=slices), make_slices(2)), ConfigError, *words)
