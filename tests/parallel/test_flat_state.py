"""Test flat states: a compiled step takes and returns one, or the tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.parallel.flat_state import FlatState, StepProgram, flatten_state

STATE = {"w": np.float32([1, 2]), "count": np.int32(3), "empty": {}}


def step(state, batch, inputs):
    """Return a state in which everything has changed, and the sum of the weights before."""
    return {"w": state["w"] + batch, "count": state["count"] + inputs, "empty": {}}, state["w"].sum()


def test_a_step_compiles_once_for_trees_and_flat_states():
    program = StepProgram(step)
    state, total = program(jax.tree.map(jnp.asarray, STATE), 0.5, 1)
    flat, next_total = program.flat(flatten_state(state), 0.5, 1)
    assert isinstance(flat, FlatState)
    assert (total, next_total) == (3, 4)
    assert jax.tree.map(lambda x: x.tolist(), flat.unflatten()) == {"w": [2, 3], "count": 5, "empty": {}}
    assert program.flat._cache_size() == 1


def test_the_state_is_donated():
    state = jax.tree.map(jnp.asarray, STATE)
    StepProgram(step)(state, 0.5, 1)
    assert state["w"].is_deleted()


@pytest.mark.parametrize("axes", [(), ("data",)])
def test_the_shardings_of_a_tree_hold_for_the_flat_state(axes):
    mesh = jax.make_mesh((2,), ("data",))
    shardings = {
        "w": jax.NamedSharding(mesh, jax.P(*axes)), "count": jax.NamedSharding(mesh, jax.P()), "empty": {},
    }  # fmt: skip
    program = StepProgram(step, in_state=shardings, out=(shardings, jax.NamedSharding(mesh, jax.P())))
    flat, _ = program.flat(flatten_state(jax.device_put(STATE, shardings)), 0.5, 1)
    assert flat.unflatten()["w"].sharding == shardings["w"]
