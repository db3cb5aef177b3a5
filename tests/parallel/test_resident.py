"""A state in pieces between the calls of a step, and steps whose inputs go to the device together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jengine.parallel.resident import InterruptedRowsError, ResidentRows, ResidentStep
from jengine.train.window import RowStep


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
    return ResidentRows(RowStep(step), {"loss": jax.ShapeDtypeStruct((4,), jnp.float32)}, jax.devices()[0])


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


def test_rows_have_small_leaves_packed_and_take_the_others_away(rows):
    whole = {
        "half": jnp.ones((2, 2), jnp.float16),
        "large": jnp.ones(4096),
        "mean": jnp.ones(3),
        "z_rng": jax.random.key(0),
    }
    kept = {name: leaf.copy() for name, leaf in whole.items() if name != "z_rng"}
    rows = ResidentRows(
        lambda s, b, r: ({**s, "mean": s["mean"] + b[0]}, r["outputs"]), {"loss": kept["mean"]}, jax.devices()[0]
    )
    pieces, _ = rows.run(whole, np.ones((4, 3), np.float32), np.zeros(4), 2)
    arrays, others = pieces.leaves
    assert {str(array.dtype): array.size for array in arrays} == {"float16": 4, "float32": 3}
    assert [leaf.shape for leaf in others] == [(4096,)]
    assert all(whole[name].is_deleted() for name in kept)
    again = pieces.whole()
    assert again["mean"].tolist() == [3.0] * 3
    assert_same_state({**again, "mean": kept["mean"]}, {**kept, "z_rng": whole["z_rng"]})


def test_the_state_may_go_from_single_calls_to_rows_and_back(rows):
    expected, losses = one_by_one(4)
    single, pieces = ResidentStep(step), state()
    pieces, first = single(pieces, BATCHES[0], RATES[0])
    pieces, two = rows.run(pieces, np.roll(BATCHES, -1, 0), np.roll(RATES, -1), 2)
    pieces, last = single(pieces, BATCHES[3], RATES[3])
    np.testing.assert_array_equal([first["loss"], *two["loss"][:2], last["loss"]], losses)
    assert_same_state(pieces.whole(), expected)
    assert (single._compiled._cache_size(), rows._compiled._cache_size()) == (1, 1)


def test_packing_moves_no_bit_of_what_is_computed_from_other_results():
    """What the next result is computed from may be kept at a higher precision where the two are joined."""

    def averaging(state, batch, hyperparams):
        trace = 0.9 * state["trace"] + jnp.sin(state["w"] @ batch) @ batch.T
        w = state["w"] - hyperparams * trace
        mean = state["mean"] * 0.999 + 0.001 * w
        return {**state, "trace": trace, "w": w, "mean": mean}, {"loss": w.sum()}

    def made():
        w = jax.random.normal(jax.random.key(3), (32, 32))
        return {"trace": jnp.zeros_like(w), "w": w, "mean": w + 0, "z_rng": jax.random.key(0)}

    batch, rate = np.asarray(jax.random.normal(jax.random.key(1), (32, 32))), np.float32(0.01)
    whole, compiled, losses = made(), jax.jit(averaging), []
    for _ in range(50):
        whole, outputs = compiled(whole, batch, rate)
        losses.append(outputs["loss"])
    rows = ResidentRows(RowStep(averaging), {"loss": jax.ShapeDtypeStruct((50,), jnp.float32)}, jax.devices()[0])
    pieces, outputs = rows.run(made(), np.stack([batch] * 50), np.full(50, rate), 50)
    assert [array.size for array in pieces.leaves[0]] == [3 * 32 * 32]
    assert_same_state(pieces.whole(), whole)
    np.testing.assert_array_equal(outputs["loss"], losses)


def test_convolutions_stay_where_they_are_fast(monkeypatch):
    """XLA compiles one for a CPU to something ten times slower if it is not in the outermost computation."""

    def convolving(state, batch, hyperparams):
        def loss(w):
            return jnp.square(jax.lax.conv(batch, w, (1, 1), "SAME")).mean()

        value, gradient = jax.value_and_grad(loss)(state["w"])
        return {**state, "w": state["w"] - hyperparams * gradient}, {"loss": value}

    texts = []
    compile_rows = ResidentRows._compile

    def telling(self, form):
        compiled = compile_rows(self, form)

        def call(*args):
            texts.append(compiled.lower(*args).compile().as_text())
            return compiled(*args)

        return call

    monkeypatch.setattr(ResidentRows, "_compile", telling)
    rows = ResidentRows(RowStep(convolving), {"loss": jax.ShapeDtypeStruct((2,), jnp.float32)}, jax.devices()[0])
    whole = {"w": jnp.ones((4, 3, 3, 3)), "z_rng": jax.random.key(0)}
    rows.run(whole, np.ones((2, 2, 3, 8, 8), np.float32), np.ones(2, np.float32), 1)
    inner, outermost = texts[0].split("\nENTRY ")
    assert " convolution(" not in inner
    assert " convolution(" in outermost


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
