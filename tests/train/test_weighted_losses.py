"""Test that losses given as (sum, weight) are divided once, by the total weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.model import CastModel, FunctionalModel, Precision
from jengine.optim import OptimWrapper
from jengine.train import build_train_step, create_train_state

RNG = np.random.default_rng(0)
# 8 sentences of up to 6 words, of different lengths, so the mean of means differs from the mean
BATCH = {
    "x": RNG.normal(size=(8, 6, 3)).astype("f"),
    "y": RNG.normal(size=(8, 6)).astype("f"),
    "words": (np.arange(6) < np.array([1, 6, 2, 5, 3, 3, 6, 1])[:, None]).astype("f"),
}


def loss(params, batch):
    error = jnp.square(jnp.einsum("bsi,i->bs", batch["x"], params["w"]) - batch["y"])
    words = batch["words"].sum()
    return {
        "loss_words": ((error * batch["words"]).sum(), words),
        "loss_size": 0.1 * jnp.square(params["w"]).sum(),
    }


def make_model(fn=loss):
    return FunctionalModel(init=lambda: {"w": jnp.array([0.5, -1.0, 2.0])}, loss=fn)


def train(model, counts):
    """Train two updates of `counts` micro-batches; return the parameters and the gradient norm after each."""
    wrapper = OptimWrapper(dict(type="SGD", lr=1.0), accumulative_counts=counts, clip_grad=dict(max_norm=1e3))
    wrapper.initialize_count_status(0, 2 * counts)
    params, _ = model.init(jax.random.key(0), None)
    state = create_train_state(params, {}, wrapper, rng=jax.random.key(0))
    update, accumulate = (jax.jit(build_train_step(model, wrapper, update=flag)) for flag in (True, False))
    updates = []
    for i in range(2 * counts):
        examples = slice(i % counts * 8 // counts, (i % counts + 1) * 8 // counts)
        step = update if wrapper.start_step() else accumulate
        state, metrics = step(state, {k: v[examples] for k, v in BATCH.items()}, wrapper.hyperparams)
        if step is update:
            updates.append((np.asarray(state.params["w"]), float(metrics["grad_norm"])))
    return updates


@pytest.mark.parametrize("counts", [2, 4, 8])
def test_micro_batches_have_the_gradient_of_the_full_batch(counts):
    for (found, norm), (expected, expected_norm) in zip(
        train(make_model(), counts), train(make_model(), 1), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-6)


def test_a_precision_policy_keeps_the_weight_shared():
    precise = CastModel(make_model(), Precision(compute="float32"))
    np.testing.assert_allclose(train(precise, 4)[0][0], train(make_model(), 1)[0][0], atol=1e-6)


def test_a_window_with_zero_weight_does_not_change_the_parameters():
    def weightless(params, batch):
        return {"loss": (jnp.sum(params["w"] * 0.0), jnp.zeros(()))}

    assert train(make_model(weightless), 2)[0][0].tolist() == [0.5, -1.0, 2.0]


def two_weights(params, batch):
    square = jnp.square(params["w"]).sum()
    return {"loss_a": (square, batch["words"].sum()), "loss_b": (square, batch["x"].sum())}


def test_without_accumulation_each_loss_is_divided_by_its_own_weight():
    train(make_model(two_weights), 1)
