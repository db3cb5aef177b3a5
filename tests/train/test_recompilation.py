import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.train import RecompilationError, RecompilationGuard, compilation_counter

ARGUMENTS = ("state", "batch")


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


def test_the_function_can_still_be_called_after_an_error():
    guard, call = guard_total("raise")
    call(1.0, {"x": X})
    call(2.0, {"x": X})
    with pytest.raises(RecompilationError):
        call(1.0, {"x": X[:3]})
    call(3.0, {"x": X})
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


def call_with_two_shapes(call):
    call(0.0, {"x": X})
    call(0.0, {"x": X[:3]})
