"""Train as one process of a run: `train_script.py WORK_DIR [KEY=VALUE ...]`."""

import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jengine.data import ArrayDataset
from jengine.evaluation import HostMetric
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.parallel import launch
from jengine.runner import Runner

PATIENCE = 180.0  # seconds


def predict(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def make_dataset(count):
    x = np.random.RandomState(0).randn(count, 2).astype(np.float32)
    return ArrayDataset(dict(x=x, y=x @ np.array([1.0, -2.0], np.float32)))


class Median(HostMetric):
    """A metric that is not a sum of batches; it is correct only if every sample is processed once."""

    def process(self, data_batch, data_samples):
        self.results += np.abs(data_samples - data_batch["y"]).tolist()

    def compute_metrics(self, results):
        return {"median": float(np.median(results)), "samples": len(results)}


class ActionHook(Hook):
    """Call `action` on one process at the start of one iteration."""

    def __init__(self, process, iteration, action):
        self.process, self.iteration, self.action = process, iteration, action

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.max_iters > 100:  # slow enough for the action to take effect before the end
            time.sleep(0.01)
        if runner.iter == self.iteration and self.process in (jax.process_index(), -1):
            self.action()


class StandStillHook(Hook):
    """Stand still on one process when a checkpoint has been read."""

    def __init__(self, process):
        self.process = process

    def after_load_checkpoint(self, runner, checkpoint):
        if jax.process_index() == self.process:
            print("stands still at", time.time(), flush=True)
            time.sleep(PATIENCE)


class StopTrainingHook(Hook):
    """Request the end of training on one process after the first validation."""

    def __init__(self, process):
        self.process = process

    def after_val_epoch(self, runner, metrics=None):
        if jax.process_index() == self.process and runner.iter == 4:
            runner.train_loop.stop_training = True


def raise_error():
    print("fails at", time.time(), flush=True)
    raise KeyError("colour")


def kill():
    print("killed at", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


ACTIONS = dict(
    terminate=lambda: os.kill(os.getpid(), signal.SIGTERM),
    terminate_twice=lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)],
    interrupt=lambda: os.kill(os.getpid(), signal.SIGINT),
    kill=kill,
    fail=raise_error,
)


def local_copies(directory):
    return [dict(type="LocalCheckpointHook", directory=directory, interval=5)] if directory else []


def main(work_dir, *settings):
    options = dict(setting.split("=") for setting in settings)
    index, count = int(options.get("index", 0)), int(options.get("count", 1))
    if count > 1:
        launch("none", options["address"], count, index, timeout=60, heartbeat_timeout=10)
    hooks = []
    if "action" in options:
        hooks = [ActionHook(int(options["process"]), int(options["iteration"]), ACTIONS[options["action"]])]
    if "still" in options:
        hooks = [StandStillHook(int(options["still"]))]
    if "stop" in options:
        hooks = [StopTrainingHook(int(options["stop"]))]
    sharded = dict(mesh=dict(data=1, fsdp=-1), fsdp_min_size=1) if "fsdp" in options else {}
    epochs = int(options.get("epochs", 2))
    clean, other = (dict(batch_size=4 // count, dataset=make_dataset(size)) for size in (11, 6))
    runner = Runner(
        model=FunctionalModel(
            init=lambda: {"w": jnp.zeros((2,)), "b": jnp.zeros(())},
            loss=lambda params, batch: jnp.square(predict(params, batch) - batch["y"]),
            predict=predict,
        ),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=8 // count, dataset=make_dataset(32))
        if "iters" not in options
        else dict(global_batch_size=8, dataset=make_dataset(int(options.get("examples", 32)))),
        train_cfg=dict(
            **(
                dict(by_epoch=False, max_iters=int(options["iters"])) if "iters" in options else dict(max_epochs=epochs)
            ),
            max_time=options.get("max_time"),
            micro_batch=int(options["micro"]) if "micro" in options else None,
        ),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=float(options.get("lr", 0.1))), clip_grad=dict(max_norm=1.0)),
        val_dataloader=dict(clean=clean, other=other) if "several" in options else clean,
        val_cfg=dict(),
        val_evaluator=[dict(type="MeanLoss", loss=lambda p, batch: jnp.square(p - batch["y"])), Median()],
        default_hooks=dict(
            checkpoint=dict(
                type="CheckpointHook",
                interval=options.get("every", 1),
                max_keep_ckpts=3,
                by_epoch="iters" not in options,
            ),
            logger=dict(type="LoggerHook", interval=1 if "iters" in options else 10),
        ),
        custom_hooks=[*hooks, *local_copies(options.get("local"))],
        parallel=dict(type="Pjit", devices=int(options["devices"]) if "devices" in options else None, **sharded),
        randomness=dict(seed=int(options["seed"]) if "seed" in options else None),
        resume=options.get("resume") == "yes",
        cfg=dict(work_dir=work_dir, optim_wrapper=dict(lr=float(options.get("lr", 0.1)))),
    )
    try:
        state = runner.train()
    finally:
        print("ended at", runner.iter, "seed", runner.seed, flush=True)
    if "save" in options and not sharded:
        results = {"w": np.asarray(state.params["w"]), "b": np.asarray(state.params["b"]), **runner.validations[-1][2]}
        np.savez(pathlib.Path(options["save"]) / f"process_{index}_of_{count}.npz", **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
