"""A Runner with a model that defines its own training step: chunks, resume, several devices, precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import FunctionalModel, LinenModel
from jengine.runner import Runner
from tests.runner.conftest import build_runner

CHECKPOINTS = dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False), logger=None)
DATA = np.random.RandomState(0).randn(24, 3).astype(np.float32)


class Net(nn.Module):
    """Network with running statistics."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train, momentum=0.9)(nn.Dense(4, use_bias=False)(x))
        return nn.Dense(1)(jnp.tanh(x))[:, 0]


class SharpnessAware(LinenModel):
    """SAM: the gradient at the worst point near the parameters, whose statistics are not kept."""

    def train_step(self, state, batch, ctx):
        def loss(params):
            return self.loss(params, state.model_state, batch, rng=ctx.rng, hyperparams=ctx.hyperparams)

        first = ctx.gradients(state, loss)
        ascent = ctx.mean(first.grads)
        radius = ctx.hyperparams["radius"] / optax.tree.norm(ascent)
        worst = jax.tree.map(lambda p, g: p + radius * g, state.params, ascent)
        second = ctx.gradients(state.replace(params=worst), loss)
        return ctx.apply(state.replace(model_state=first.model_state), second.grads, first.metrics)


class Radius(Hook):
    """Set the radius from the host."""

    acts_on = "hyperparams"

    def before_train(self, runner):
        runner.hyperparams["radius"] = 0.05

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.hyperparams["radius"] = 0.05 / (1 + runner.iter)


def squared_error(outputs, batch):
    return jnp.square(outputs - batch["y"])


@pytest.fixture
def train(tmp_path):
    """Return a function that trains SAM for 6 iterations of 8 examples and returns the state."""

    def run(name, max_iters=6, steps_per_call=1, **changes):
        arguments = dict(
            model=SharpnessAware(Net(), squared_error, inputs="x"),
            train_dataloader=dict(batch_size=8, dataset=ArrayDataset(dict(x=DATA, y=np.sin(DATA.sum(axis=1))))),
            train_cfg=dict(by_epoch=False, max_iters=max_iters, steps_per_call=steps_per_call),
            optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.1), clip_grad=dict(max_norm=1.0)),
            param_scheduler=dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=4),
            custom_hooks=[dict(type="EMAHook"), Radius()],
            randomness=dict(seed=0),
            log_level="ERROR",
        )
        return build_runner(tmp_path / name, **{**arguments, **changes}).train()

    return run


def assert_equal(state, expected, rtol=0.0, atol=0.0):
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.full_optimization
def test_chunks_and_a_resumed_run_are_equal_to_the_last_bit(train, tmp_path):
    expected = train("single", default_hooks=CHECKPOINTS)
    assert int(expected.step) == 6
    assert_equal(train("chunks", steps_per_call=3), expected)
    assert_equal(train("resumed", resume=str(tmp_path / "single" / "iter_2")), expected)


def test_several_devices_train_like_one(train):
    assert_equal(train("several", parallel=dict(type="Pjit", devices=2)), train("one"), rtol=1e-5, atol=1e-6)


def test_data_parallel_averages_gradients_and_metrics(tmp_path):
    def train_step(state, batch, ctx):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - 1) ** 2))(state.params["w"])
        return ctx.apply(state, {"w": grads}, {"loss": loss})

    losses = []

    class Losses(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            losses.append(float(outputs["loss"]))

    states = [
        Runner(
            FunctionalModel(lambda: {"w": jnp.ones(3)}, train_step=train_step),
            tmp_path / str(i),
            train_dataloader=dict(batch_size=8, dataset=ArrayDataset(dict(x=DATA))),
            train_cfg=dict(max_epochs=1),
            optim_wrapper=optax.sgd(0.1),
            custom_hooks=[Losses()],
            default_hooks=dict(logger=None, checkpoint=None),
            parallel=parallel,
            randomness=dict(seed=0),
        ).train()
        for i, parallel in enumerate((dict(type="SingleDevice"), dict(type="DataParallel", devices=2)))
    ]
    assert_equal(states[1].params, states[0].params, rtol=1e-6)
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-6)


def test_the_networks_of_the_step_compute_in_the_precision_of_the_run(train):
    state = train("low", precision="bfloat16")
    expected = train("full")
    difference = np.abs(np.asarray(state.params["Dense_1"]["kernel"] - expected.params["Dense_1"]["kernel"])).max()
    assert 1e-5 < difference < 0.1
    assert {str(leaf.dtype) for leaf in jax.tree.leaves((state.params, state.model_state))} == {"float32"}


def test_a_step_of_the_runner_refuses_chunks_and_names_the_hooks_without_effect(tmp_path, caplog):
    class Own(Runner):
        def train_step(self, batch):
            return {"loss": jnp.zeros(())}

    def run(**cfg):
        Own(
            FunctionalModel(lambda: {"w": jnp.zeros(2)}, lambda params, batch: params["w"].sum()), tmp_path / "own",
            train_dataloader=[np.zeros(2, np.float32)], train_cfg=dict(max_epochs=1, **cfg),
            optim_wrapper=optax.sgd(0.1), custom_hooks=[dict(type="EMAHook")],
        ).train()  # fmt: skip

    with pytest.raises(ConfigError, match=r"steps_per_call` must be 1 for a Runner with a `train_step` .* got 2"):
        run(steps_per_call=2)
    assert list((tmp_path / "own").glob("*/*.log"))
    run()
    assert "Own.train_step replaces the built-in step: the traced points of EMAHook have no effect" in (caplog.text)
