"""Config of a run that takes milliseconds, for tests that start it in processes."""

import jax.numpy as jnp
import numpy as np

from jengine.config import HOOKS
from jengine.hooks import Hook
from jengine.model import FunctionalModel

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
DATA = dict(batch_size=8, dataset=[{"x": x, "y": x @ np.float32([1, 2, 3])} for x in X])


@HOOKS.register_module(force=True)
class CrashHook(Hook):
    """End of a run by an error after a number of iterations; None for none."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.at:
            raise RuntimeError(f"crashed at {self.at}")


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def predict(params, batch):
    return batch["x"] @ params["w"]


def predicted_loss(predictions, batch):
    return jnp.mean((predictions - batch["y"]) ** 2)


def get_config():
    return dict(
        model=FunctionalModel(init=lambda: {"w": jnp.zeros(3)}, loss=loss, predict=predict),
        train_dataloader=DATA,
        val_dataloader=DATA,
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=predicted_loss),
        train_cfg=dict(by_epoch=False, max_iters=4, val_interval=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        custom_hooks=[dict(type="CrashHook", at=None)],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=2, save_best="loss")),
    )
