"""Test that the padded last batch of an epoch trains like the smaller batch that it stands for."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jengine.data import ArrayDataset
from jengine.model import FunctionalModel, LinenModel
from jengine.runner import Runner

X = np.random.RandomState(0).randn(10, 3).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(4)(x)))


def loss(outputs, batch):
    return (outputs**2).sum(axis=1)


def test_batch_norm_counts_only_the_real_examples_of_the_last_batch(tmp_path):
    model = LinenModel(Net(), loss, inputs="x")
    runner = Runner(
        model,
        tmp_path,
        train_dataloader=dict(
            batch_size=4, dataset=ArrayDataset({"x": X}), drop_last=False, sampler=dict(type="DefaultSampler", shuffle=False)
        ),
        train_cfg=dict(max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(checkpoint=None, logger=None),
        randomness=dict(seed=0),
    )  # fmt: skip
    found = runner.train()
    params, state = jax.jit(model.init)(jax.random.fold_in(jax.random.key(runner.seed), 0), {"x": X[:4]})

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def differentiate(params, state, x):
        losses, state = model.loss(params, state, {"x": x}, rng=jax.random.key(0), hyperparams={})
        return losses["loss"].mean(), state

    for _ in range(2):
        for x in (X[:4], X[4:8], X[8:]):
            grads, state = differentiate(params, state, x)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    expected = (params, state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), (found.params, found.model_state), expected
    )


def test_a_log_line_after_several_chunks_weighs_the_losses_by_examples(tmp_path):
    model = FunctionalModel(init=lambda: {"w": jnp.ones(())}, loss=lambda params, batch: params["w"] * batch["x"])
    values = np.arange(10, dtype=np.float32) ** 2
    Runner(
        model,
        tmp_path,
        train_dataloader=dict(
            batch_size=4, dataset=ArrayDataset({"x": values}), drop_last=False, sampler=dict(type="DefaultSampler", shuffle=False)
        ),
        train_cfg=dict(by_epoch=False, max_iters=6, steps_per_call=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=6)),
        log_processor=dict(type="LogProcessor", window_size=6, by_epoch=False),
    ).train()  # fmt: skip
    (path,) = tmp_path.glob("*/vis_data/scalars.json")
    (logged,) = [json.loads(line)["loss"] for line in path.read_text().splitlines() if "loss" in json.loads(line)]
    assert logged == pytest.approx(values.mean(), rel=1e-6)  # of 20 examples in six batches of 4, 4, 2, 4, 4, 2
