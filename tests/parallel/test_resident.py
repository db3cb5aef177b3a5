"""A state in pieces between the calls of a step, and steps whose inputs go to the device together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jengine.parallel.resident import InterruptedRowsError, ResidentRows, ResidentStep


class State(struct.PyTreeNode):
    step: jax.Array
    w: jax.Array
    own_key: jax.Array
    done: jax.Array
    rng: jax.Array


def state():
    return State(step=jnp.int32(0), w=jnp.zeros(3), own_key=jax.random.key(1), done=jnp.int32(5), rng=jax.random.key(0))


def step(state, batch, hyperparams):
    noise = jax.random.normal(jax.random.fold_in(state.rng, state.step), (3,))
    own_key = jax.random.fold_in(state.own_key, state.done)
    w = state.w + hyperparams * (batch + noise + jax.random.uniform(own_key))
    return state.replace(step=state.step + 1, w=w, own_key=own_key, done=state.done + 2), {"loss": w.sum()}


def row(state, batches, rows):
    i = rows["row"]
    state, outputs = step(state, batches[i], rows["hyperparams"][i])
    return state, {"loss": rows["outputs"]["loss"].at[i].set(outputs["loss"])}


def assert_same_state(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = (jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        np.testing.assert_array_equal(a, b)


BATCHES = np.arange(12, dtype=np.float32).reshape(4, 3)
RATES = np.float32([0.1, 0.2, 0.3, 0.4])


def one_by_one(count):
    whole, losses, compiled = state(), [], jax.jit(step)
    for i in range(count):
        whole, outputs = compiled(whole, BATCHES[i], RATES[i])
        losses.append(outputs["loss"])
    return whole, np.array(losses)


def test_pieces_are_what_a_compiled_step_gives():
    expected, losses = one_by_one(3)
    resident, pieces, found = ResidentStep(step), state(), []
    for i in range(3):
        pieces, outputs = resident(pieces, BATCHES[i], RATES[i])
        found.append(outputs["loss"])
    assert pieces.counters.tolist() == [3, 11]
    assert [leaf.shape for leaf in pieces.leaves] == [(3,), (2,)]
    assert_same_state(pieces.whole(), expected)
    np.testing.assert_array_equal(found, losses)
    again, _ = resident(pieces.whole(), BATCHES[0], RATES[0])  # a state that was put together is taken as it is
    assert int(again.whole().step) == 4


def test_a_state_without_counters():
    whole = {"w": jnp.zeros(2), "z_rng": jax.random.key(0)}
    pieces, _ = ResidentStep(lambda s, b, h: ({**s, "w": s["w"] + b}, {}))(whole, np.float32(2), None)
    assert pieces.whole()["w"].tolist() == [2.0, 2.0]


@pytest.fixture
def rows():
    return ResidentRows(row, {"loss": jax.ShapeDtypeStruct((4,), jnp.float32)}, jax.devices()[0])


def test_rows_are_what_single_calls_give(rows):
    expected, losses = one_by_one(4)
    pieces, first = rows.run(state(), BATCHES, RATES, 3)
    pieces, second = rows.run(pieces, BATCHES[3:].repeat(4, axis=0), RATES[3:].repeat(4), 1)
    assert_same_state(pieces.whole(), expected)
    np.testing.assert_array_equal([*first["loss"][:3], second["loss"][0]], losses)
    assert rows._compiled._cache_size() == 1


def test_the_inputs_may_change_once_they_were_handed_over(rows):
    batches, rates = BATCHES.copy(), RATES.copy()
    pieces, _ = rows.run(state(), batches, rates, 3)
    batches[:], rates[:] = np.nan, np.nan
    assert_same_state(pieces.whole(), one_by_one(3)[0])


def test_where_a_row_fails_the_outputs_of_those_before_are_told(rows, monkeypatch):
    _, losses = one_by_one(2)
    rows.run(state(), BATCHES, RATES, 1)
    compiled, calls = rows._compiled, []

    def failing(*args):
        calls.append(None)
        if len(calls) == 3:
            raise ZeroDivisionError
        return compiled(*args)

    monkeypatch.setattr(rows, "_compiled", failing)
    with pytest.raises(InterruptedRowsError) as caught:
        rows.run(rows._pieces(state()), BATCHES, RATES, 4)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.done == 2
    np.testing.assert_array_equal(caught.value.outputs["loss"][:2], losses)
