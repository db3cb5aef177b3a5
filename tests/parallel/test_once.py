"""Programs that run once: what they are compiled with, and what goes on while they are compiled."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jengine.parallel.once import jit_once

from jengine.model import SmallCNN
from jengine.parallel import Coming, SingleDevice


def init_cnn(seed, image):
    key = jax.random.key(seed)
    return SmallCNN(widths=(4, 8)).init(key, image), jnp.asarray(0.5), key


INPUTS = np.int64(3), np.zeros((2, 8, 8, 3), np.float32)


def test_few_optimizations_leave_every_bit_of_an_initialization():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    expected = jax.jit(init_cnn)(*INPUTS)
    found = jit_once(init_cnn, "cpu", place)(*INPUTS)
    for a, b in zip(jax.tree.leaves(found[:2]), jax.tree.leaves(expected[:2]), strict=True):
        assert a.committed
        np.testing.assert_array_equal(a, b)


def test_only_a_cpu_compiles_with_fewer(monkeypatch):
    options = []
    monkeypatch.setattr(jax, "jit", lambda fn, compiler_options, **_: options.append(compiler_options))
    for platform in ("cpu", "gpu", "tpu"):
        jit_once(init_cnn, platform, None)
    assert options == [{"xla_backend_optimization_level": 1}, None, None]


def test_the_form_of_what_comes_is_known_before_it_is_there():
    coming = Coming(SingleDevice().compile_init(init_cnn, *INPUTS), *INPUTS)
    made = coming.whole()
    shapes, arrays = jax.tree.leaves(coming.shapes), jax.tree.leaves(made)
    assert jax.tree.structure(coming.shapes) == jax.tree.structure(made)
    for shape, array in zip(shapes, arrays, strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.weak_type == getattr(array, "weak_type", False)
        assert shape.sharding == array.sharding


class Program:
    """As a compiled function, of which each stage does what it is told."""

    out_info = "shapes"

    def __init__(self, compile):
        self.compile = compile

    def trace(self, *args):
        return self

    def lower(self):
        return self


def test_it_is_compiled_beside_the_caller_who_runs_it():
    go_on, threads = threading.Event(), []

    def compile():
        assert go_on.wait(10)
        threads.append(threading.current_thread().name)
        return lambda x: threads.append(threading.current_thread().name) or x + 1

    coming = Coming(Program(compile), 2)  # would not return if it waited
    assert coming.shapes == "shapes"
    go_on.set()
    assert coming.whole() == 3
    assert threads == ["jengine-once_0", threading.current_thread().name]


@pytest.mark.parametrize("stage", ["compile", "run"])
def test_an_error_is_raised_where_it_is_waited_for(stage):
    def fail(*args):
        raise RuntimeError(f"out of memory in {stage}")

    coming = Coming(Program(fail if stage == "compile" else lambda: fail), 2)
    with pytest.raises(RuntimeError, match=f"out of memory in {stage}"):
        coming.whole()
