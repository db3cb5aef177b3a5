"""Test that float64 is kept from the loss to the log; docs/mmengine.md names a tolerance of 1e-12."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.model import FunctionalModel
from jengine.optim import build_optim_wrapper
from jengine.runner import Runner
from jengine.train import RecompilationGuard, build_train_step, create_train_state
from tests.runner.conftest import build_runner

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


MIXED = FunctionalModel(
    init=lambda: {"kernel": jnp.ones((3, 2), jnp.float32), "scale": jnp.ones(2, jnp.float64)},
    loss=lambda params, batch: jnp.square((batch["x"] @ params["kernel"] * params["scale"]).sum(-1) - batch["y"]),
)
IN_FLOAT64 = FunctionalModel(
    init=lambda: jax.tree.map(lambda x: x.astype(jnp.float64), MIXED.init(jax.random.key(0), None)[0]),
    loss=lambda params, batch: jnp.square((batch["x"] @ params["kernel"] * params["scale"]).sum(-1) - batch["y"]),
)
# those of jengine that take vectors, and some of optax
OPTIMIZERS = [
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "BertAdam", "DAdaptAdam", "LARS", "Lamb", "Lion"),
    *("NAdam", "Prodigy", "ProximalAdan", "RAdam", "RMSprop", "Rprop", "SGD", "TorchAdafactor"),
    *("adamw", "lion", "adafactor", "lamb"),
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_and_float64_parameters_of_one_model_keep_their_states(name, x64):
    settings = dict(momentum=0.9) if name in ("SGD", "RMSprop") else {}

    def train(model, count=3):
        rate = dict(learning_rate=0.01) if name.islower() else dict(lr=0.01)
        wrapper = build_optim_wrapper(None, dict(optimizer=dict(type=name, **rate, **settings)))
        guard = RecompilationGuard(build_train_step(model, wrapper), ("state", "batch", "hyperparams"))
        step = jax.jit(guard)
        state = create_train_state(*model.init(jax.random.key(0), None), wrapper, rng=jax.random.key(0))
        types = jax.tree.map(jnp.result_type, state)
        for batch in BATCHES[:count]:
            state, _ = step(state, batch, wrapper.hyperparams)
        assert jax.tree.map(jnp.result_type, state) == types
        assert guard.traces == 1
        return state.params

    mixed, exact = train(MIXED), train(IN_FLOAT64)
    assert not np.array_equal(mixed["scale"], np.ones(2))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), mixed, exact)


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_run_with_float32_and_float64_parameters_is_resumed(tmp_path, x64, steps_per_call):
    def run(work_dir, iterations, **changes):
        return build_runner(
            work_dir,
            MIXED,
            train_dataloader=BATCHES,
            train_cfg=dict(by_epoch=False, max_iters=iterations, steps_per_call=steps_per_call, on_recompile="raise"),
            optim_wrapper=dict(
                type="AmpOptimWrapper", dtype="float32", optimizer=dict(type="AdamW", lr=0.01), accumulative_counts=2,
                clip_grad=dict(max_norm=1.0), loss_scale="dynamic",
            ),
            custom_hooks=[dict(type="EMAHook"), dict(type="NumericsGuardHook"), dict(type="HistogramHook", interval=2)],
            default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=2)),
            **changes,
        ).train()  # fmt: skip

    whole = run(tmp_path / "whole", 4)
    resumed = run(tmp_path / "resumed", 4, resume=tmp_path / "whole" / "iter_2")
    assert resumed.params["kernel"].dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
