"""Test packed states: in which form a compiled step takes and returns one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.parallel.packed import Packed, StepProgram, pack

STATE = {"w": np.float32([1, 2]), "count": np.int32(3), "empty": {}}


def step(state, batch, inputs):
    """Return a state in which everything has changed, and the sum of the weights before."""
    return {"w": state["w"] + batch, "count": state["count"] + inputs, "empty": {}}, state["w"].sum()


def test_a_step_returns_the_form_that_it_takes_and_compiles_once_for_both():
    program = StepProgram(step)
    state, total = program(jax.tree.map(jnp.asarray, STATE), 0.5, 1)
    packed, next_total = program(pack(state), 0.5, 1)
    assert isinstance(packed, Packed)
    assert (total, next_total) == (3, 4)
    unpacked = packed.unpack()
    assert jax.tree.map(lambda x: x.tolist(), unpacked) == {"w": [2, 3], "count": 5, "empty": {}}
    assert program.packed._cache_size() == 1


def test_both_forms_are_donated_and_lowered_to_one_program():
    program = StepProgram(step)
    state = jax.tree.map(jnp.asarray, STATE)
    texts = {program.lower(form, 0.5, 1).as_text() for form in (state, pack(state))}
    assert len(texts) == 1
    program(state, 0.5, 1)
    assert state["w"].is_deleted()


def test_a_packed_state_is_packed_once():
    packed = pack(STATE)
    assert pack(packed) is packed
    assert pack(None).unpack() is None


@pytest.mark.parametrize("sharded", [False, True])
def test_shardings_of_a_tree_hold_for_the_packed_state(sharded):
    mesh = jax.make_mesh((2,), ("data",))
    axes = ("data",) if sharded else ()
    shardings = {
        "w": jax.NamedSharding(mesh, jax.P(*axes)), "count": jax.NamedSharding(mesh, jax.P()), "empty": {},
    }  # fmt: skip
    program = StepProgram(step, in_state=shardings, out=(shardings, jax.NamedSharding(mesh, jax.P())))
    packed, _ = program(pack(jax.device_put(STATE, shardings)), 0.5, 1)
    assert packed.unpack()["w"].sharding == shardings["w"]
