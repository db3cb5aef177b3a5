"""Train on a stream, interrupt the run, resume it, and return the examples that each part saw."""

import contextlib
import pathlib

import jax.numpy as jnp
import numpy as np

from jengine.hooks import Hook
from jengine.model import FunctionalModel
from tests.runner.conftest import build_runner

SAVE = 3  # iterations between checkpoints


class Stopped(Exception):
    """Stop a run."""


class RecordIds(Hook):
    """Record the ids of the examples of each iteration, and raise an error after some iterations."""

    def __init__(self, stop=None):
        self.ids = []
        self.stop = stop

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.ids.append(np.asarray(data_batch["id"]).ravel().tolist())
        if self.stop is not None and runner.iter == self.stop:
            raise Stopped


def model():
    return FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params, batch: jnp.square(params["w"] - batch["id"].astype(jnp.float32)).reshape(-1),
        predict=lambda params, batch: params["w"] + batch["id"],
    )


def train(work_dir, make_data, stop=None, resume=False, save=SAVE, **changes):
    """Train for 12 iterations, saved every `save`; return the ids of each iteration, and the run."""
    hook = RecordIds(stop)
    arguments = dict(
        model=model(),
        train_dataloader=make_data(),
        train_cfg=dict(by_epoch=False, max_iters=12),
        custom_hooks=[hook],
        default_hooks=dict(logger=None, checkpoint=dict(type="CheckpointHook", interval=save, by_epoch=False)),
        resume=resume,
    )
    runner = build_runner(work_dir, **{**arguments, **changes})
    with contextlib.suppress(Stopped):
        runner.train()
    return hook.ids, runner


def read_log(runner):
    """Return the log of a run."""
    return (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()


def train_with_restart(tmp_path, make_data, stop=5, **changes):
    """Return the ids of a whole run, those with the ones of a run from its last checkpoint before `stop`, and that run."""
    whole, _ = train(tmp_path / "whole", make_data, **changes)
    saved = stop // SAVE * SAVE
    second, runner = train(tmp_path / "parts", make_data, resume=tmp_path / "whole" / f"iter_{saved}", **changes)
    assert len(second) == len(whole) - saved
    return whole, whole[:saved] + second, runner
