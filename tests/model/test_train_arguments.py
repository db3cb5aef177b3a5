"""Arguments that select training or inference, under each of their names and in each kind of model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jengine.config.explain import explain
from jengine.model import FunctionalModel, LinenModel, NnxModel

BATCH = {"image": np.ones((4, 2), np.float32)}
NAMES = {"train": True, "training": True, "is_train": True, "is_training": True, "deterministic": False}


def squared(outputs, batch):
    return {"loss": outputs}


def add_argument(template, name):
    """Return the function that a source defines, with an argument for the mode: keyword-only or with a default."""
    names = {"nn": nn, "nnx": nnx, "jnp": jnp}
    exec(template.replace("MODE", name).replace("SENSE", "" if NAMES[name] else "not "), names)
    return names["make"]


LINEN = """
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, ARGUMENT):
        scale = self.param("scale", nn.initializers.ones, ())
        return scale * x.sum(axis=1) * (2.0 if SENSE MODE else 1.0)

def make(model, loss):
    return model(Net(), loss)
"""
NNX = """
class Net(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x, ARGUMENT):
        return self.scale * x.sum(axis=1) * (2.0 if SENSE MODE else 1.0)

def make(model, loss):
    return model(Net, loss)
"""
FUNCTIONS = """
def call(params, batch, ARGUMENT):
    return params["scale"] * batch["image"].sum(axis=1) * (2.0 if SENSE MODE else 1.0)

def make(model, loss):
    return model(lambda: {"scale": jnp.ones(())}, call, call)
"""


@pytest.mark.parametrize("argument", ["*, MODE", "MODE", "MODE=SENSE True", "*, MODE=SENSE True"])
@pytest.mark.parametrize("name", NAMES)
def test_the_mode_is_set_alike_in_modules_and_functions(name, argument):
    for adapter, source in ((LinenModel, LINEN), (NnxModel, NNX), (FunctionalModel, FUNCTIONS)):
        model = add_argument(source.replace("ARGUMENT", argument), name)(adapter, squared)
        variables = model.init(jax.random.key(0), BATCH)
        losses, _ = model.loss(*variables, BATCH, rng=jax.random.key(0), hyperparams={})
        np.testing.assert_array_equal(losses["loss"], np.full(4, 4.0), err_msg=adapter.__name__)
        np.testing.assert_array_equal(model.predict(*variables, BATCH), np.full(4, 2.0), err_msg=adapter.__name__)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(2)(x) if train else x


class Checkpointed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.remat(Block)()(x, train)


class Jitted(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    @nnx.jit
    def __call__(self, x, deterministic):
        return x if deterministic else self.linear(x)


@jax.jit
def jitted(params, batch, *, train):
    return params * batch["image"] if train else batch["image"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (LinenModel(Checkpointed(), squared), "train"),
        (NnxModel(Jitted, squared), "deterministic"),
        (FunctionalModel(lambda: jnp.ones(()), jitted), "train"),
    ],
    ids=["nn.remat", "nnx.jit", "jax.jit"],
)
def test_a_mode_that_a_transformation_traces_is_explained(model, name):
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        model.loss(*model.init(jax.random.key(0), BATCH), BATCH, rng=jax.random.key(0), hyperparams={})
    explain(caught.value)
    (note,) = [note for note in caught.value.__notes__ if "static" in note]
    assert f"`{name}` must be static" in note
    assert f"static_argnames={name!r}" in note


def test_an_array_for_a_static_argument_is_explained():
    call = jax.jit(lambda params, image, train: params * image if train else image, static_argnames="train")
    model = FunctionalModel(
        lambda: jnp.ones(()), lambda params, batch: call(params, batch["image"], train=batch["image"].sum() > 0)
    )
    params, state = model.init(jax.random.key(0), BATCH)
    step = jax.jit(lambda batch: model.loss(params, state, batch, rng=jax.random.key(0), hyperparams={}))
    with pytest.raises((TypeError, ValueError)) as caught:
        step(BATCH)
    explain(caught.value)
    assert any("must be a Python value, got one that depends on traced arrays" in x for x in caught.value.__notes__)
