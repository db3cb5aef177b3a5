"""Test that padding counts neither in the loss nor in the statistics of BatchNorm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jengine.model import CastModel, LinenModel, NnxModel, Precision
from jengine.train.losses import total_loss

REAL = np.random.RandomState(0).randn(6, 2, 5).astype(np.float32)  # with three, rounding is amplified a hundredfold
PADDED = np.concatenate([REAL, REAL[:1], REAL[:1]])
MASK = np.array([True] * 6 + [False] * 2)


class LinenNet(linen.Module):
    remat: bool = False

    @linen.compact
    def __call__(self, x, train: bool):
        norm = linen.remat(linen.BatchNorm, static_argnums=()) if self.remat else linen.BatchNorm
        x = norm(use_running_average=not train, momentum=0.9)(linen.Dense(4)(x))
        return linen.BatchNorm(use_running_average=not train)(linen.Dense(2)(x).reshape(len(x), -1))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(5, 4, rngs=rngs), nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.last, self.last_norm = nnx.Linear(4, 2, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.first(x))
        return self.last_norm(self.last(x).reshape(len(x), -1))


def loss(outputs, batch):
    return {"loss": jnp.sin(3 * outputs).sum(axis=1)}


def train(model, batch, variables):
    """Return loss, gradients and the new model state."""

    def total(params):
        losses, state = model.loss(params, variables[1], batch, rng=jax.random.key(0), hyperparams={})
        return total_loss(losses, batch)[0], state

    (value, state), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(variables[0])
    return value, grads, state


MODELS = [LinenModel(LinenNet(), loss), LinenModel(LinenNet(remat=True), loss), NnxModel(NnxNet, loss)]


@pytest.mark.parametrize("model", MODELS, ids=["linen", "linen with remat", "nnx"])
def test_a_padded_batch_trains_like_the_batch_without_its_padding(model):
    variables = jax.jit(model.init)(jax.random.key(1), {"image": REAL})
    expected = train(model, {"image": REAL}, variables)
    found = train(model, {"image": PADDED, "mask": MASK}, variables)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, expected)
    counted = train(model, {"image": PADDED}, variables)[2]
    largest = max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), counted, expected[2])))
    assert largest > 1e-3, "counting the padding would show"


@pytest.mark.parametrize("model", MODELS[::2], ids=["linen", "nnx"])
def test_a_share_that_is_all_padding_has_finite_statistics(model):
    variables = jax.jit(model.init)(jax.random.key(1), {"image": REAL})
    found = train(model, {"image": REAL, "mask": np.zeros(6, bool)}, variables)[2]
    expected = train(model, {"image": REAL}, variables)[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, expected)


def test_padding_is_left_out_in_low_precision_too():
    for model in (MODELS[0], MODELS[2]):
        variables = jax.jit(model.init)(jax.random.key(1), {"image": REAL})
        cast = CastModel(model, Precision("bfloat16"))
        expected = train(cast, {"image": REAL}, variables)[2]
        found = train(cast, {"image": PADDED, "mask": MASK}, variables)[2]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3), found, expected)
