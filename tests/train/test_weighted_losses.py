"""Losses given as (sum, weight) are divided once, by the weight of everything that is averaged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.model import CastModel, FunctionalModel, Precision
from jengine.optim import OptimWrapper
from jengine.train import build_train_step, create_train_state

RNG = np.random.default_rng(0)
# 8 sentences of up to 6 words: their lengths differ, so that a mean of means is not the mean
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


def model(fn=loss):
    return FunctionalModel(init=lambda: {"w": jnp.array([0.5, -1.0, 2.0])}, loss=fn)


def train(model, counts):
    """One update from `counts` micro-batches; the gradient, that is what lr=1 took off the parameters."""
    wrapper = OptimWrapper(dict(type="SGD", lr=1.0), accumulative_counts=counts, clip_grad=dict(max_norm=1e3))
    wrapper.initialize_count_status(0, 2 * counts)
    params, _ = model.init(jax.random.key(0), None)
    state = create_train_state(params, {}, wrapper, rng=jax.random.key(0))
    update, accumulate = (jax.jit(build_train_step(model, wrapper, update=flag)) for flag in (True, False))
    seen = []
    for i in range(2 * counts):
        rows = slice(i % counts * 8 // counts, (i % counts + 1) * 8 // counts)
        step = update if wrapper.start_step() else accumulate
        state, outputs = step(state, {k: v[rows] for k, v in BATCH.items()}, wrapper.hyperparams)
        if step is update:
            seen.append((np.asarray(state.params["w"]), float(outputs["grad_norm"])))
    return seen


@pytest.mark.parametrize("counts", [2, 4, 8])
def test_micro_batches_give_the_gradient_of_the_full_batch(counts):
    for (found, norm), (expected, expected_norm) in zip(train(model(), counts), train(model(), 1), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-6)


def test_a_precision_policy_leaves_the_weights_one():
    precise = CastModel(model(), Precision(compute="float32"))
    np.testing.assert_allclose(train(precise, 4)[0][0], train(model(), 1)[0][0], atol=1e-6)


def test_a_window_without_any_weight_changes_nothing():
    def nothing(params, batch):
        return {"loss": (jnp.sum(params["w"] * 0.0), jnp.zeros(()))}

    assert train(model(nothing), 2)[0][0].tolist() == [0.5, -1.0, 2.0]


def two_weights(params, batch):
    square = jnp.square(params["w"]).sum()
    return {"loss_a": (square, batch["words"].sum()), "loss_b": (square, batch["x"].sum())}


def test_different_weights_are_refused_where_something_is_averaged():
    with pytest.raises(ValueError, match="'loss_a' and 'loss_b' have different weights"):
        train(model(two_weights), 2)
    train(model(two_weights), 1)  # alone, each is divided by its own
