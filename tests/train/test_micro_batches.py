"""Test that a batch computed in parts has the losses and gradients of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.model import FunctionalModel
from tests.runner.conftest import build_runner

X = np.random.RandomState(0).randn(24, 3).astype(np.float32)
WEIGHTS = np.random.RandomState(1).rand(24).astype(np.float32)


def error(params, batch):
    return (batch["x"] @ params["w"] - 1.0) ** 2


LOSSES = {
    "mean": error,
    "weighted": lambda p, b: {"loss": ((error(p, b) * b["weight"]).sum(), b["weight"].sum()), "mean": error(p, b)},
}
PARALLEL = {
    "one device": None,
    "four devices": dict(type="Pjit", devices=4),
    "replicas": dict(type="DataParallel", devices=2),
}


def train(path, loss="mean", parallel="one device", micro_batch=None, phases=None, **optim):
    runner = build_runner(
        path,
        FunctionalModel(lambda: {"w": jnp.full(3, 0.5)}, loss=LOSSES[loss], predict=error),
        train_dataloader=dict(batch_size=8, dataset=ArrayDataset(dict(x=X, weight=WEIGHTS))),
        train_cfg=dict(max_epochs=2, micro_batch=micro_batch),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.1), clip_grad=dict(max_norm=1.0), **optim),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=1)),
        parallel=PARALLEL[parallel],
        randomness=dict(seed=0),
    )
    state = runner.train()
    runner.message_hub.flush()
    history = runner.message_hub.log_scalars
    return (
        runner,
        state.params["w"],
        np.concatenate([history[f"train/{name}"].data[0] for name in ("loss", "grad_norm")]),
    )


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize(
    ("loss", "optim"),
    [("mean", {}), ("weighted", {}), ("weighted", dict(accumulative_counts=2))],
    ids=["mean", "weighted", "in a window"],
)
def test_parts_of_a_batch_have_the_losses_and_gradients_of_the_whole(tmp_path, loss, optim, parallel):
    _, expected, losses = train(tmp_path / "whole", loss, **optim)
    # the share of a device has 8, 2 or 4 examples
    runner, found, others = train(tmp_path / "parts", loss, parallel, micro_batch=1, **optim)
    assert runner.train_loop.micro_batches == {"one device": 8, "four devices": 2, "replicas": 4}[parallel]
    if optim and parallel == "replicas":  # an iteration that only accumulates has the loss of one replica
        losses, others = losses[1::2], others[1::2]
    np.testing.assert_allclose(others, losses, rtol=1e-6)
    # Adam enlarges the rounding of small gradients, and the parameters come from 0.5, where rounding is 6e-8
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_the_parts_are_as_large_as_allowed_and_the_log_says_so(tmp_path, caplog):
    runner, *_ = train(tmp_path, micro_batch=5)
    assert runner.train_loop.micro_batches == 2  # of 4 examples
    assert "3 batches of 8, in 2 micro-batches" in caplog.text
    batch = {"x": X[:8], "weight": WEIGHTS[:8]}
    jaxpr = jax.make_jaxpr(runner.programs.update.__wrapped__)(runner.state, batch, runner.step_hyperparams())
    shapes = {str(v.aval.shape) for eqn in jaxpr.eqns if eqn.primitive.name == "scan" for v in eqn.invars}
    assert "(2, 4, 3)" in shapes
