"""Activation checkpointing of modules by path, from outside the module."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jengine.extras.networks.remat import matches
from jengine.model import CastModel, LinenModel, NnxModel, Precision

BATCH = {"x": np.random.RandomState(0).randn(4, 8).astype(np.float32), "mask": np.array([True, True, True, False])}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, scale, train=False):
        y = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        self.sow("losses", "size", jnp.square(y).mean())
        return x + scale * nn.Dropout(0.5, deterministic=not train)(nn.relu(y))


class Net(nn.Module):
    def setup(self):
        self.layers = [Block() for _ in range(2)]
        self.head = nn.Dense(1)

    def __call__(self, x, train=False):
        for layer in self.layers:
            x = layer(x, 2.0, train=train)
        return self.head(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, scale, *, flag=False):
        assert flag is True
        y = self.norm(self.dense(x))
        self.sow(nnx.Intermediate, "size", jnp.square(y).mean())
        return x + scale * self.dropout(nnx.relu(y))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x, jnp.float32(2.0), flag=True)
        return self.head(x)


def squares(outputs, batch):
    return jnp.square(outputs)


def linen(**settings):
    return LinenModel(Net(), squares, inputs="x", sown_losses=["losses"], **settings)


def of_nnx(**settings):
    return NnxModel(NnxNet, squares, inputs="x", sown_losses=["Intermediate"], **settings)


@pytest.mark.parametrize("make", [linen, of_nnx])
@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_checkpointed_modules_have_the_same_losses_gradients_and_statistics(make, compute):
    found = []
    for settings in ({}, dict(activation_checkpointing=["layers[._]*"])):
        model = make(**settings)
        model = model if compute is None else CastModel(model, Precision(compute=compute))
        params, state = model.init(jax.random.key(0), BATCH)

        def loss(params, model=model, state=state):
            losses, new_state = model.loss(params, state, BATCH, rng=jax.random.key(1), hyperparams={})
            return sum(map(jnp.mean, jax.tree.leaves(losses))), new_state

        text = str(jax.make_jaxpr(jax.grad(lambda p, loss=loss: loss(p)[0]))(params))
        (value, new_state), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        found.append((text.count("remat2["), value, new_state, grads))
        assert "remat2[" not in str(jax.make_jaxpr(lambda p, m=model, s=state: m.predict(p, s, BATCH))(params))
    plain, checkpointed = found
    assert plain[0] == 0
    assert checkpointed[0] >= 2  # both layers
    # sums that are recomputed are fused, and rounded, in another way: gradients in bfloat16 are noise around zero here
    end, tolerance = (4, 1e-4) if compute is None else (3, 2e-2)
    for one, other in zip(jax.tree.leaves(plain[1:end]), jax.tree.leaves(checkpointed[1:end]), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_patterns_are_paths_of_flax_or_pytorch_with_wildcards():
    assert matches("layers_3", ["layers.3"])
    assert matches("backbone.layers_3.attn", ["*.attn"])
    assert not matches("backbone.layers_3.attn", ["layers_*"])
