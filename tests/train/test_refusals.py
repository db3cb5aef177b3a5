"""What steps, states and averages refuse: a call, its error, and the words that must be in the message."""

import collections

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config.errors import ArgumentError, ConfigError
from jengine.extras.optimizers.averages import CosineEMA, ExpMomentumEMA
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.optim import OptimWrapper
from jengine.train import (
    AVERAGES,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    RecompilationError,
    RecompilationGuard,
    StochasticWeightAverage,
    build_train_step,
    create_train_state,
    total_loss,
)
from tests.refusals import check_row
from tests.runner.conftest import build_runner

X = np.zeros((4, 2), np.float32)
SGD = dict(type="SGD", lr=0.1)


class Forgetful(Hook):
    """Return no context."""

    def traced_grads(self, ctx):
        """Change nothing."""
        ctx.replace(grads=None)


@flax.struct.dataclass
class Batch:
    """A batch with a static field."""

    x: jax.Array
    mode: str = flax.struct.field(pytree_node=False, default="train")


def trace_step(loss=lambda params, batch: params["w"] * batch["x"].sum(), hooks=(), **settings):
    """Trace a step of an optimizer, as a run does before it compiles it."""
    wrapper = OptimWrapper(SGD, **settings)
    state = create_train_state({"w": jnp.ones(())}, {}, wrapper, hooks, rng=jax.random.key(1))
    step = build_train_step(FunctionalModel(lambda: {"w": jnp.ones(())}, loss), wrapper, hooks)
    jax.eval_shape(step, state, {"x": X}, wrapper.hyperparams)


def two_weights(params, batch):
    return {"loss_a": (params["w"], batch["x"].sum()), "loss_b": (params["w"], 2 * batch["x"].sum())}


def create_state_with_keys_of(implementation):
    jax.config.update("jax_default_prng_impl", implementation)
    try:
        create_train_state({}, {}, OptimWrapper(SGD), rng=jax.random.key(0))
    finally:
        jax.config.update("jax_default_prng_impl", "threefry2x32")


def trace_again(first, second):
    """Trace a guarded function with one batch and then another."""
    guard = RecompilationGuard(lambda state, batch: state, ("state", "batch"), on_recompile="raise")
    guard(1.0, first)
    guard.record_shapes(1.0, first)
    guard(1.0, second)


def many(size):
    return {f"x{i}": X[:size] for i in range(8)}


def train_in_parts(path):
    build_runner(path, train_dataloader=[{"x": X, "y": X[:, 0]}], train_cfg=dict(max_epochs=2, micro_batch=2)).train()


IN_0_1 = (ArgumentError, "momentum`", "(0, 1)")
FROM_1 = ("interval`", "integer", "at least 1")
REFUSED = {
    # averages
    "a momentum of 0": (lambda: ExponentialMovingAverage(momentum=0.0), *IN_0_1, "got 0.0"),
    "a momentum of 1": (lambda: ExponentialMovingAverage(momentum=1.0), *IN_0_1, "got 1.0"),
    "a momentum above 1": (lambda: CosineEMA(momentum=1.5), *IN_0_1, "got 1.5"),
    "a momentum of 1 at last": (lambda: CosineEMA(end_momentum=1.0), ArgumentError, "end_momentum`", "[0, 1)", "got 1.0"),
    "a cosine of no steps": (lambda: CosineEMA(total_steps=0), ArgumentError, "total_steps`", "at least 1 or None", "got 0"),
    "a cosine of unknown steps": (lambda: CosineEMA().weight(jnp.int32(1)), ValueError, "total_steps", "Runner", "got None"),
    "annealing by 0": (lambda: MomentumAnnealingEMA(gamma=0), ArgumentError, "MomentumAnnealingEMA.gamma`", "above 0", "got 0"),
    "an exponent below 0": (lambda: ExpMomentumEMA(gamma=-1), ArgumentError, "ExpMomentumEMA.gamma`", "above 0", "got -1"),
    "an average every 0 steps": (lambda: StochasticWeightAverage(interval=0), ArgumentError, *FROM_1, "got 0"),
    "an average every 1.5 steps": (lambda: StochasticWeightAverage(interval=1.5), TypeError, *FROM_1, "got 1.5"),
    "a misspelt average": (lambda: AVERAGES.get("ExponentialMovingAvg"), KeyError, "did you mean 'ExponentialMovingAverage'"),
    # steps
    "a hook without a context": (lambda: trace_step(hooks=[Forgetful()]), TypeError, "Forgetful.traced_grads", "return the context"),
    "losses without a loss": (lambda: total_loss({"acc": 1.0}), ValueError, "'loss'", "got ['acc']"),
    "two weights with accumulation": (lambda: trace_step(two_weights, accumulative_counts=2), ValueError, "'loss_a' and 'loss_b'", "weight"),
    "keys whose fold_in commutes": (lambda: create_state_with_keys_of("unsafe_rbg"), ValueError, "'rbg'", "'threefry2x32'", "got 'unsafe_rbg'"),
    "micro-batches of unknown size": (lambda tmp_path: train_in_parts(tmp_path), ConfigError, "train_cfg.micro_batch`", "None", "batch_size", "got 2"),
    # second traces
    **{
        f"another {what}": (lambda first=first, second=second: trace_again(first, second), RecompilationError, *words)
        for what, first, second, *words in (
            ("shape", {"x": X}, {"x": X[:3]}, "batch.x: was float32[4,2], is float32[3,2]"),
            ("dtype", {"x": X}, {"x": X.astype(np.float16)}, "batch.x: was float32[4,2], is float16[4,2]"),
            ("key", {"x": X}, {"x": X, "mask": np.ones(4, bool)}, "batch.mask: was absent, is bool[4]"),
            ("weak type", {"x": 1.0}, {"x": np.float32(1)}, "batch.x: was float32[] (weakly typed), is float32[]"),
            ("container", {"x": X}, collections.OrderedDict(x=X), "batch: was a dict, is a OrderedDict"),
            ("None", {"x": X}, {"x": X, "y": None}, "batch.y: was absent, is None"),
            ("sequence", [X], (X,), "batch: was a list, is a tuple"),
            ("static field", Batch(X), Batch(X, mode="eval"), "batch.mode: was 'train' (static), is 'eval' (static)"),
            ("eight shapes", many(4), many(3), "x4: was", "and 3 more"),
        )
    },
    "an unknown answer to a second trace": (lambda: RecompilationGuard(len, ("x",), on_recompile="rise"), ValueError, "on_recompile`", "'warn' or 'raise'", "got 'rise'"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_a_step_cannot_do_is_refused(row, request):
    check_row(request, *row)
