"""What models and losses refuse: a call, its error, and the words that must be in the message."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jengine.config.errors import ConfigError
from jengine.config.explain import explain
from jengine.model import (
    CastModel,
    CrossEntropy,
    FunctionalModel,
    LinenModel,
    MeanSquaredError,
    NnxModel,
    Precision,
)
from jengine.train.losses import total_loss
from tests.refusals import check_row

BATCH = {"image": np.ones((4, 2), np.float32), "label": np.array([0, 1, 1, 1])}
LOGITS = np.zeros((2, 3), np.float32)


def squared(outputs, batch):
    return {"loss": outputs**2}


def compute(model):
    """Compute the loss of a batch, and explain its error as a run does."""
    try:
        model.loss(*model.init(jax.random.key(0), BATCH), BATCH, rng=jax.random.key(0), hyperparams={})
    except Exception as error:
        explain(error)
        raise


def empty():
    return {}


class Linen(nn.Module):
    """A module with one parameter that does something else beside: sow a loss, or keep a collection."""

    does: str = ""

    @nn.compact
    def __call__(self, x):
        scale = self.param("w", nn.initializers.ones, ())
        if self.does == "sow":
            self.sow("aux_losses", "balance", jnp.float32(2.0))
        if self.does == "freeze":
            scale = scale * self.variable("frozen", "scale", jnp.ones, ()).value
        return x * scale


class Nnx(nnx.Module):
    """A module that does something else in its call: change the shape of a variable, or create a parameter."""

    def __init__(self, rngs, does=""):
        self.memory, self.does = nnx.Cache(jnp.zeros(2)), does

    def __call__(self, x):
        if self.does == "reshape":
            self.memory.set_value(jnp.zeros(3))
        if self.does == "create":
            self.late = nnx.Param(jnp.zeros(3))
        return x


# Modes that a transformation traces.


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


def pass_an_array_for_a_mode():
    call = jax.jit(lambda params, image, train: params * image if train else image, static_argnames="train")

    def loss(params, batch):
        return call(params, batch["image"], train=params > 0)

    compute(FunctionalModel(lambda: jnp.ones(()), lambda params, batch: jax.jit(loss)(params, batch)))


def linear():
    return FunctionalModel(
        init=lambda: {"w": jnp.ones(2)},
        loss=lambda params, batch: batch["image"] @ params["w"],
        predict=lambda params, batch: batch["image"] @ params["w"],
    )


def predict(model):
    model.predict(*model.init(jax.random.key(0), BATCH), BATCH)


TRACED = jax.errors.TracerBoolConversionError
NAMES = ("params, model_state, batch", "(params, batch)")
REFUSED = {
    # functions
    **{
        f"a loss of {signature}": (lambda loss=loss: FunctionalModel(empty, loss), TypeError, "FunctionalModel", "`loss`", *NAMES, f"got {signature}")
        for loss, signature in (
            (lambda p, s, b: 0, "(p, s, b)"),
            (lambda p: 0, "(p)"),
            (lambda params, batch, rngs: 0, "(params, batch, rngs)"),
            (lambda p, b, *, scale: 0, "(p, b, scale)"),
            (lambda *args: 0, "(*args)"),
        )
    },
    "an init of three arguments": (lambda: FunctionalModel(lambda a, b, c: {}, lambda p, b: 0), TypeError, "`init`", "(rng, batch)", "got (a, b"),
    "a prediction of one argument": (lambda: FunctionalModel(empty, lambda p, b: 0, lambda p: 0), TypeError, "`predict`", NAMES[0]),
    "a number as a loss": (lambda: FunctionalModel(empty, {"gen": 3}), TypeError, "`FunctionalModel.loss.gen`", "function", "got 3"),
    "an init without the model state": (
        lambda: compute(FunctionalModel(lambda: {"w": 1.0}, lambda params, model_state: params["w"])), TypeError, "`init`", "(params, model_state)", "got dict",
    ),
    # modules
    "a number as a module": (lambda: NnxModel(3, squared), TypeError, "`module`", "(rngs) -> nnx.Module"),
    "a prediction before init": (lambda: NnxModel(Nnx, squared).predict({}, {}, BATCH), RuntimeError, "`init`"),
    "a variable of another shape": (lambda: compute(NnxModel(lambda rngs: Nnx(rngs, "reshape"), squared)), TypeError, "variable memory"),
    "a late parameter": (lambda: compute(NnxModel(lambda rngs: Nnx(rngs, "create"), squared)), TypeError, "create parameters"),
    "a collection of frozen values": (lambda: compute(LinenModel(Linen("freeze"), squared)), ConfigError, "collection", "'frozen'"),
    "an entry that the batch does not have": (
        lambda: compute(LinenModel(Linen(), squared, inputs="pixels")), KeyError, "`LinenModel.inputs`", "'pixels'", "image f32[4,2], label i64[4]",
    ),
    "a name that is not sown": (lambda: compute(LinenModel(Linen("sow"), squared, sown_losses=("aux_loss",))), ValueError, "'aux_loss'", "'aux_losses': "),
    "a sown loss with the name of another": (
        lambda: compute(LinenModel(Linen("sow"), lambda outputs, batch: {"balance_loss": outputs**2}, sown_losses=("aux_losses",))), ValueError, "'balance_loss'",
    ),
    # precision
    "a loss in another dtype": (
        lambda: compute(CastModel(linear(), Precision(compute="bfloat16"))), ValueError, "bfloat16", "float32", "jengine.model.autocast(",
    ),
    "predictions in another dtype": (lambda: predict(CastModel(linear(), Precision(compute="bfloat16"))), ValueError, "bfloat16", "float32"),
    # modes
    "a mode within nn.remat": (lambda: compute(LinenModel(Checkpointed(), squared)), TRACED, "`train` must be static", "static_argnames='train'"),
    "a mode within nnx.jit": (lambda: compute(NnxModel(Jitted, squared)), TRACED, "`deterministic` must be static", "static_argnames='deterministic'"),
    "a mode within jax.jit": (lambda: compute(FunctionalModel(lambda: jnp.ones(()), jitted)), TRACED, "`train` must be static", "static_argnames='train'"),
    "an array as a static mode": (pass_an_array_for_a_mode, (TypeError, ValueError), "Python value", "traced arrays"),
    # losses
    "one of two outputs": (lambda: CrossEntropy()((LOGITS, LOGITS), BATCH), KeyError, "`CrossEntropy.output`", "got None", "0 f32[2,3], 1 f32[2,3]"),
    "an output of another name": (lambda: MeanSquaredError()({"mean": LOGITS}, {"target": LOGITS}), KeyError, "`MeanSquaredError.output`", "mean f32[2,3]"),
    "labels that are floats": (lambda: CrossEntropy(label="y")(LOGITS, {"y": jnp.zeros(2)}), ValueError, "class indices", "'y'", "f32[2]"),
    "a loss that is a dict": (lambda: total_loss({"loss_cls": 1.0, "loss_box": {"x": 1.0}}), TypeError, "'loss_box'", "array", "dict"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_models_that_cannot_be_are_refused(row, request):
    check_row(request, *row)
