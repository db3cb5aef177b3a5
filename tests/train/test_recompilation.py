import collections
import logging

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jengine.train import RecompilationError, RecompilationGuard, compilation_counter

ARGUMENTS = ("state", "batch")


@flax.struct.dataclass
class Batch:
    x: jax.Array
    mode: str = flax.struct.field(pytree_node=False, default="train")


def total(state, batch):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves((state, batch)))


def watched(on_recompile=None):
    traced = RecompilationGuard(total, ARGUMENTS, on_recompile=on_recompile)
    compiled = jax.jit(traced)

    def call(*args):
        before = compilation_counter.count
        result = compiled(*args)
        if compilation_counter.count != before:
            traced.check_shardings(*args)
        return result

    return traced, call


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.fixture
def warnings_of():
    handler = Records()
    logging.getLogger("jengine").addHandler(handler)
    yield lambda: handler.texts
    logging.getLogger("jengine").removeHandler(handler)


X = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"x": X}, {"x": X[:3]}, r"batch\.x: was float32\[4,2\], is float32\[3,2\]"),
        ({"x": X}, {"x": X.astype(np.float16)}, r"batch\.x: was float32\[4,2\], is float16\[4,2\]"),
        ({"x": X}, {"x": X, "mask": np.ones(4, bool)}, r"batch\.mask: was absent, is bool\[4\]"),
        ({"x": 1.0}, {"x": np.float32(1)}, r"batch\.x: was float32\[\] \(weakly typed\), is float32\[\]"),
        ({"x": X}, collections.OrderedDict(x=X), r"batch: was a dict, is a OrderedDict"),
        ({"x": X}, {"x": X, "y": None}, r"batch\.y: was absent, is None"),
        ([X], (X,), r"batch: was a list, is a tuple"),
        (Batch(X), Batch(X, mode="eval"), r"batch\.mode: was 'train' \(static\), is 'eval' \(static\)"),
    ],
    ids=["shape", "dtype", "key", "weak type", "container", "none", "sequence", "static"],
)
def test_another_form_names_the_path_and_what_changed(first, second, message):
    traced, call = watched("raise")
    call(1.0, first)
    call(2.0, first)
    with pytest.raises(RecompilationError, match=message):
        call(1.0, second)
    call(3.0, first)  # goes on
    assert traced.traces == 1


def test_a_warning_is_given_once_a_form_and_the_function_goes_on(warnings_of):
    traced, call = watched("warn")
    for rows in (4, 3, 4, 3, 2):
        assert call(0.0, {"x": np.ones((rows, 2), np.float32)}) == 2 * rows
    assert traced.traces == 3
    assert [text.splitlines()[1] for text in warnings_of()] == [
        "  batch.x: was float32[4,2], is float32[3,2]",
        "  batch.x: was float32[4,2], is float32[2,2]",
    ]
    assert "is compiled again" in warnings_of()[0]
    assert "on_recompile='raise'" in warnings_of()[0]


def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda x: jax.device_put(x, jax.devices()[1]), r"batch\.x: was on cpu:0, is on cpu:1"),
        (
            lambda x: jax.device_put(x, NamedSharding(mesh(), PartitionSpec("data"))),
            r"batch\.x: was on cpu:0, is divided by data over {'data': 4} of cpu:0, cpu:1",
        ),
    ],
    ids=["device", "sharding"],
)
def test_another_place_is_told_though_the_form_is_the_same(place, message, warnings_of):
    for on_recompile in ("warn", "raise"):
        _, call = watched(on_recompile)
        call(0.0, {"x": jax.device_put(X, jax.devices()[0])})
        moved = {"x": place(X)}
        if on_recompile == "raise":
            with pytest.raises(RecompilationError, match=message):
                call(0.0, moved)
        else:
            call(0.0, moved)
            call(0.0, moved)
    (text,) = warnings_of()
    assert "is compiled again" in text
    assert message.split(":")[0].replace("\\", "") in text


def test_arrays_that_are_tied_to_no_device_are_as_good_as_host_arrays(warnings_of):
    traced, call = watched("raise")
    call(0.0, {"x": X})
    call(0.0, {"x": jnp.asarray(X)})
    traced.check_shardings(0.0, {"x": jnp.asarray(X)})
    assert warnings_of() == []
    assert traced.shapes[1]["x"] == jax.ShapeDtypeStruct((4, 2), jnp.float32)


def test_the_mode_comes_from_the_argument_else_from_the_environment_else_it_warns(monkeypatch):
    with pytest.raises(RecompilationError):
        both_forms(watched()[1])  # the tests set JENGINE_ON_RECOMPILE=raise
    both_forms(watched("warn")[1])
    monkeypatch.delenv("JENGINE_ON_RECOMPILE")
    both_forms(watched()[1])
    with pytest.raises(ValueError, match="on_recompile must be 'warn' or 'raise', got 'rise'.*'raise'"):
        RecompilationGuard(total, ARGUMENTS, on_recompile="rise")


def both_forms(call):
    call(0.0, {"x": X})
    call(0.0, {"x": X[:3]})


def test_at_most_five_changes_are_shown():
    _, call = watched("raise")
    call(0.0, {f"x{i}": X for i in range(8)})
    with pytest.raises(RecompilationError, match=r"x4: was .*\n  and 3 more"):
        call(0.0, {f"x{i}": X[:3] for i in range(8)})
