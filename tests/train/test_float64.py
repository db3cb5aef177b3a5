"""Test that float64 is kept from the loss to the log; docs/mmengine.md names a tolerance of 1e-12."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.model import FunctionalModel
from jengine.runner import Runner

SIZE = 28  # the inverses of these numbers are not exact in float32
CLIP, SCALE, MOMENTUM, LR = 0.65, 1000.0, 0.1, 0.3
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((6 * SIZE, 3)), RNG.standard_normal(6 * SIZE)
BATCHES = [{"x": X[i : i + SIZE], "y": Y[i : i + SIZE]} for i in range(0, len(X), SIZE)]


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)  # in all threads, unlike the context manager
    yield
    jax.config.update("jax_enable_x64", False)


def predict(params, batch):
    return batch["x"] @ params["w"]


def squared(params, batch):
    return jnp.square(predict(params, batch) - batch["y"])


def weighted(params, batch):
    return {"loss": (0.1 * squared(params, batch).sum(), 0.1 * batch["y"].shape[0])}


def train_by_hand():
    """Return the parameters, their average, all losses and the norms of three updates from two batches each."""
    w, average, losses, norms = np.zeros(3), np.zeros(3), [], []
    for update in range(3):
        gradient = np.zeros(3)
        for batch in BATCHES[2 * update : 2 * update + 2]:
            error = batch["x"] @ w - batch["y"]
            losses.append(np.square(error).mean())
            gradient += batch["x"].T @ error / SIZE  # twice, and the mean of two batches
        norms.append(np.sqrt(np.square(gradient).sum()))
        w = w - LR * gradient * min(1.0, CLIP / (norms[-1] + 1e-6))
        average = average + MOMENTUM * (w - average) if update else w
    return w, average, losses, norms


@pytest.mark.parametrize(
    ("loss", "parallel"), [(squared, None), (weighted, None), (squared, dict(type="DataParallel", devices=2))]
)
def test_a_run_in_float64_equals_one_by_hand(tmp_path, x64, loss, parallel):
    runner = Runner(
        FunctionalModel(init=lambda: {"w": jnp.zeros(3, jnp.float64)}, loss=loss, predict=predict),
        work_dir=tmp_path,
        train_dataloader=BATCHES,
        train_cfg=dict(max_epochs=1),
        val_dataloader=BATCHES,
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=lambda predictions, batch: jnp.square(predictions - batch["y"])),
        optim_wrapper=dict(
            type="AmpOptimWrapper", dtype="float64", loss_scale=SCALE, optimizer=dict(type="SGD", lr=LR),
            accumulative_counts=2, clip_grad=dict(max_norm=CLIP),
        ),
        custom_hooks=[dict(type="EMAHook", momentum=MOMENTUM, count_by="update"), dict(type="NumericsGuardHook")],
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1), checkpoint=None),
        parallel=parallel,
    )  # fmt: skip
    state = runner.train()
    w, average, losses, norms = train_by_hand()
    exact = dict(rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(state.params["w"], w, **exact)
    np.testing.assert_allclose(state.hook_state["EMAHook"].params["w"], average, **exact)
    validated = np.square(X @ average - Y).mean()
    np.testing.assert_allclose(list(runner.validations[-1][2].values()), [validated], **exact)
    updates = slice(1, None, 2)  # replicas log their mean loss in iterations that update
    history = runner.message_hub.get_scalar("train/loss").data[0]
    np.testing.assert_allclose(history[updates], losses[updates], **exact)
    np.testing.assert_allclose(runner.message_hub.get_scalar("train/grad_norm").data[0], norms, **exact)
    if parallel is None:
        scalars = (tmp_path / runner.timestamp / "vis_data" / "scalars.json").read_text()
        np.testing.assert_allclose(json.loads(scalars.splitlines()[0])["loss"], losses[0], **exact)
