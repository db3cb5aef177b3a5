"""A run under JAX's transfer guard, which a user sets once the Runner is built."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.model import FunctionalModel
from jengine.runner import Runner


def make_data():
    return ArrayDataset(dict(x=np.ones((32, 8), np.float32), y=np.arange(32) % 4))


@pytest.mark.parametrize("name", ["jax_transfer_guard", "jax_transfer_guard_host_to_device"])
def test_a_guard_set_after_the_runner_is_built_lets_a_whole_run_pass(tmp_path, name):
    model = FunctionalModel(
        init=lambda rng: jax.random.normal(rng, (8, 4)),
        loss=lambda params, batch: jnp.square(batch["x"] @ params).mean(),
        predict=lambda params, batch: batch["x"] @ params,
    )
    loader = dict(batch_size=16, dataset=dict(type=make_data))
    runner = Runner(
        model,
        tmp_path,
        train_dataloader=loader,
        train_cfg=dict(max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-2)),
        val_dataloader=loader,
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy", label="y"),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
        custom_hooks=[dict(type="EMAHook")],
    )
    try:
        jax.config.update(name, "disallow")
        runner.train()
    finally:
        jax.config.update(name, None)
    assert runner.iter == 4
    assert len(runner.validations) == 2
