import collections
import logging

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.train import RecompilationError, RecompilationGuard, compilation_counter

ARGUMENTS = ("state", "batch")


@flax.struct.dataclass
class Batch:
    x: jax.Array
    mode: str = flax.struct.field(pytree_node=False, default="train")


def total(state, batch):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves((state, batch)))


def guard_total(on_recompile=None):
    guard = RecompilationGuard(total, ARGUMENTS, on_recompile=on_recompile)
    compiled = jax.jit(guard)

    def call(*args):
        before = compilation_counter.count
        result = compiled(*args)
        if compilation_counter.count != before:
            guard.record_shapes(*args)
        return result

    return guard, call


class RecordingHandler(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def warnings():
    handler = RecordingHandler()
    logging.getLogger("jengine").addHandler(handler)
    yield handler.messages
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
def test_an_error_names_the_path_and_the_change(first, second, message):
    guard, call = guard_total("raise")
    call(1.0, first)
    call(2.0, first)
    with pytest.raises(RecompilationError, match=message):
        call(1.0, second)
    call(3.0, first)  # the function can still be called
    assert guard.traces == 1


def test_each_new_signature_is_reported_once_as_a_warning(warnings):
    guard, call = guard_total("warn")
    for size in (4, 3, 4, 3, 2):
        assert call(0.0, {"x": np.ones((size, 2), np.float32)}) == 2 * size
    assert guard.traces == 3
    assert [text.splitlines()[1] for text in warnings] == [
        "  batch.x: was float32[4,2], is float32[3,2]",
        "  batch.x: was float32[4,2], is float32[2,2]",
    ]
    assert "is compiled again" in warnings[0]
    assert "on_recompile='raise'" in warnings[0]


def test_uncommitted_arrays_are_equal_to_host_arrays(warnings):
    guard, call = guard_total("raise")
    call(0.0, {"x": X})
    call(0.0, {"x": jnp.asarray(X)})
    guard.record_shapes(0.0, {"x": jnp.asarray(X)})
    assert warnings == []
    assert guard.shapes[1]["x"] == jax.ShapeDtypeStruct((4, 2), jnp.float32)


def test_the_mode_is_the_argument_or_the_environment_variable_or_warn(monkeypatch):
    with pytest.raises(RecompilationError):
        call_with_two_shapes(guard_total()[1])  # the tests set JENGINE_ON_RECOMPILE=raise
    call_with_two_shapes(guard_total("warn")[1])
    monkeypatch.delenv("JENGINE_ON_RECOMPILE")
    call_with_two_shapes(guard_total()[1])
    with pytest.raises(ValueError, match="on_recompile` must be 'warn' or 'raise', got 'rise'"):
        RecompilationGuard(total, ARGUMENTS, on_recompile="rise")


def call_with_two_shapes(call):
    call(0.0, {"x": X})
    call(0.0, {"x": X[:3]})


def test_at_most_five_changes_are_shown():
    _, call = guard_total("raise")
    call(0.0, {f"x{i}": X for i in range(8)})
    with pytest.raises(RecompilationError, match=r"x4: was .*\n  and 3 more"):
        call(0.0, {f"x{i}": X[:3] for i in range(8)})
