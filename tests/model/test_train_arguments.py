"""Arguments that select training or inference, under each of their names and in each kind of model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

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
