"""Test that the configs of docs/devices.md can be built."""

import pathlib
import re

from jax.sharding import AxisType

from jengine.config import STRATEGIES
from jengine.parallel import DataParallel, DiLoCo, Pjit, SingleDevice, build_mesh
from tests.extras.plan.test_slices import make_slices


def test_the_configs_of_the_page_can_be_built():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    lines, rules, meshes, slices, alone, mapped = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    built = []
    set_up, *configs = re.split(r"(?m)^(?=parallel)", meshes)
    for config in [
        *lines.strip().splitlines(),
        rules,
        *(set_up + config for config in configs),
        *mapped.strip().splitlines(),
        *alone.strip().splitlines(),
    ]:
        names = {}
        exec(config, names)
        built.append(STRATEGIES.build(names["parallel"]))
    assert [type(strategy) for strategy in built] == [
        Pjit,
        Pjit,
        DataParallel,
        DataParallel,
        DiLoCo,
        SingleDevice,
        Pjit,
        Pjit,
        Pjit,
        SingleDevice,
        Pjit,
        DataParallel,
        DiLoCo,
        DiLoCo,
    ]
    assert dict(built[1].mesh.shape) == dict(built[3].mesh.shape) == dict(data=2, fsdp=4, tensor=1)
    assert built[3].replicas == 2
    assert built[11].axis_name == "batch"
    assert built[7].mesh.shape == built[8].mesh.shape == dict(replica=4, expert=2)
    assert built[7].mesh.axis_types == (AxisType.Explicit,) * 2
    assert built[8].mesh.axis_types == (AxisType.Auto,) * 2
    names = {}
    exec(slices, names)
    assert dict(build_mesh(names["parallel"]["mesh"], make_slices(2)).shape) == dict(data=2, fsdp=16, tensor=1)
