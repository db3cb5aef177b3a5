"""Config of a run of three epochs in milliseconds, whose checkpoints are evaluated by followers."""

import jax.numpy as jnp
import numpy as np

from jengine.model import FunctionalModel

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
DATA = dict(batch_size=8, dataset=[{"x": x, "y": x @ np.float32([1, 2, 3])} for x in X])


def init():
    return {"w": jnp.zeros(3)}


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def predict(params, batch):
    return batch["x"] @ params["w"]


def predicted_loss(predictions, batch):
    return (predictions - batch["y"]) ** 2


def get_config(kind="followed"):
    """Return the config; of kind 'tested' the run validates itself, and followers test it."""
    evaluator = dict(type="MeanLoss", loss=predicted_loss)
    test = dict(test_dataloader=DATA, test_cfg=dict(), test_evaluator=evaluator)
    return dict(
        **(test if kind == "tested" else {}),
        model=FunctionalModel(init=init, loss=loss, predict=predict),
        train_dataloader=DATA,
        val_dataloader=DATA,
        val_cfg=dict(follow="elsewhere") if kind == "followed" else dict(),
        val_evaluator=evaluator,
        train_cfg=dict(max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=1, save_best="loss")),
    )
