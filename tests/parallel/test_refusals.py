"""What meshes, placements and processes refuse: a call, its error, and the words that must be in the message."""

import functools
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jengine.config.errors import ConfigError
from jengine.parallel import Pjit, Placement, SingleDevice, build_mesh
from jengine.parallel.failures import ProcessError
from jengine.parallel.mesh import find_data_shard
from jengine.parallel.processes import ProcessMismatchError, get_client
from tests.refusals import check_row

from .conftest import make_loader, squared_error
from .test_comparison import compare
from .test_mesh import make_mesh

MESH = build_mesh(dict(data=2, fsdp=2, tensor=2))
PARAMS = {
    "embed": {"embedding": jax.ShapeDtypeStruct((64, 8), jnp.float32)},
    "layers_0": {"mlp": {"kernel": jax.ShapeDtypeStruct((8, 32), jnp.float32)}},
}


def differ(first, second):
    compare({"config": {"model": [first]}}, {"config": {"model": [second]}})


def init_in_another_context(strategy):
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)):
        strategy.compile_init(lambda: jnp.zeros(4))()


def place(rules=(), axes=None, **settings):
    Placement(MESH, rules, **settings).place(PARAMS, axes)


def get_client_of(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.distributed", module)
    get_client()


class Client:
    """A client without one of its calls."""

    blocking_key_value_get = key_value_delete = key_value_increment = None
    key_value_set = key_value_try_get = wait_at_barrier = None


VALIDATES = dict(
    val_dataloader=make_loader(4), val_cfg=dict(), val_evaluator=dict(type="MeanLoss", loss=squared_error)
)
INDIVISIBLE = (ValueError, "8 times", "dimension size is 4", "(4, 8)")
OF_JAX = f"jax {jax.__version__}"
TABLE = (ConfigError, "'embed.embedding'", "one of its axes", "Pjit")
REFUSED = {
    # meshes and batches
    "processes whose rows overlap in part": (lambda: find_data_shard(make_mesh((3, 1, 2), [0, 1, 1, 2, 0, 2]), 0), ConfigError, "parts of a batch", "got [(0, 1"),
    "a process without a device": (lambda: find_data_shard(make_mesh((2, 1, 1), [0, 1]), 2), ConfigError, "every process", "none of process 2"),
    "a mesh of five devices": (lambda make_run: make_run(dict(type="Pjit", mesh=dict(data=5))), ConfigError, "`parallel`"),
    "one device in a context of eight": (lambda: init_in_another_context(SingleDevice()), ValueError, "context mesh"),
    "two devices in a context of eight": (lambda: init_in_another_context(Pjit(devices=2)), ValueError, "context mesh"),
    "a batch of 4 on 8 devices": (lambda make_run: make_run(dict(type="Pjit", devices=8), train_dataloader=make_loader(4)).train(), *INDIVISIBLE),
    "a validation of 4 on 8 devices": (lambda make_run: make_run(dict(type="Pjit", devices=8), **VALIDATES).val(), *INDIVISIBLE),
    "an entry without a batch axis": (lambda: Pjit().put_batch({"x": np.zeros((8, 1)), "t": np.float32(1)}), ValueError, "rank at least 1"),
    # placements
    **{
        f"a lookup table along {axes}, by a {by}": (lambda arguments=arguments: place(*arguments, tables_along_one_axis=True), *TABLE, words)
        for axes in (("fsdp", "tensor"), ("tensor", "fsdp"))
        for by, arguments, words in (("rule", ([("embedding", axes)],), "rule 'embedding'"), ("name", ((), {"embed.embedding": axes}), "logical axes"))
    },
    "a rule for no parameter": (
        lambda: place([("layers_0.mpl.kernel", (None, "tensor"))], strict=True), ConfigError, "'layers_0.mpl.kernel'", "closest: layers_0.mlp.kernel",
    ),
    # processes
    "other numbers": (lambda: differ(0.1, 0.2), ProcessMismatchError, "0.1 on process 0", "0.2 on process 1"),
    "other numbers of NumPy": (lambda: differ(np.float32(0.1), np.float32(0.2)), ProcessMismatchError, "model[0]"),
    "an array with another element": (lambda: differ(np.arange(5000), np.arange(5000) + (np.arange(5000) == 2500)), ProcessMismatchError, "ndarray int64[5000]"),
    "other arrays of JAX": (lambda: differ(jnp.ones(3), jnp.zeros(3)), ProcessMismatchError, "float32[3]"),
    "other dtypes": (lambda: differ(np.dtype("int8"), np.dtype("int16")), ProcessMismatchError, "'int8'"),
    "other paths": (lambda: differ(pathlib.Path("a"), pathlib.Path("b")), ProcessMismatchError, "'a'"),
    "other complex numbers": (lambda: differ(1 + 1j, 1 - 1j), ProcessMismatchError, "(1+1j)"),
    "other sets": (lambda: differ({1, 2}, {1, 3}), ProcessMismatchError, "['1', '2']"),
    "other functions": (lambda: differ(np.sin, np.cos), ProcessMismatchError, "'numpy.sin'"),
    "other arguments of a partial": (lambda: differ(functools.partial(max, key=abs), functools.partial(max, key=len)), ProcessMismatchError, "`config.model[0].key`"),
    "a shorter list": (lambda: differ([1, 2], [1]), ProcessMismatchError, "model[0][1]`", "2 on process 0", "nothing on"),
    "a longer dict": (lambda: differ({}, {"c": 2}), ProcessMismatchError, "model[0].c`", "nothing on process 0", "2 on"),
    "a JAX without its service": (lambda monkeypatch: get_client_of(None, monkeypatch), ProcessError, "`blocking_key_value_get`", OF_JAX, "install"),
    "a JAX with another name of its service": (lambda monkeypatch: get_client_of(types.SimpleNamespace(), monkeypatch), ProcessError, "`blocking_key_value_get`", OF_JAX, "install"),
    "a JAX without a call of its service": (
        lambda monkeypatch: get_client_of(types.SimpleNamespace(global_state=types.SimpleNamespace(client=Client())), monkeypatch),
        ProcessError, "`key_value_dir_get`", OF_JAX, "install",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_in_parallel_is_refused(row, request):
    check_row(request, *row)
