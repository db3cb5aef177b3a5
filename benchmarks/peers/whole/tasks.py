"""Define the tasks in NumPy, for environments without JAX or PyTorch.

A task gives the data, batches, steps, schedule and the iterations of validations and checkpoints.
Every system trains an equal network with AdamW, gradients clipped to a norm of 1, writes the loss
to a file, keeps checkpoints of parameters and optimizer, and ends with the metric of the last
validation in `result.json`.
"""

import json
import math
import os
import pathlib
import sys
from typing import NamedTuple

import numpy as np


class Task(NamedTuple):
    """Describe a task; intervals are in iterations."""

    config: str  # of jengine, in configs/
    changes: tuple[str, ...]  # of this config
    outputs: int  # classes or bytes
    batch: int
    steps: int
    warmup: int
    rate: float
    betas: tuple[float, float]
    decay: float
    smoothing: float
    val_every: int
    save_every: int
    log_every: int


# without TensorBoard: the others write one file of numbers
LOCAL = "visualizer={'vis_backends': [{'type': 'LocalVisBackend'}]}"
MODULE = (
    "model.module={'type': 'TransformerLM', 'width': 64, 'depth': 2, 'heads': 4, 'mlp_width': 192,"
    " 'vocab_size': 256, 'norm': 'layer', 'mlp': 'plain', 'activation': 'gelu_tanh',"
    " 'positions': 'learned', 'max_length': 64, 'bias': True, 'remat': False, 'scan': False}"
)
TASKS = {
    "cnn": Task(
        config="digits_cnn.py",
        changes=(LOCAL,),
        outputs=10,
        batch=64,
        steps=440,
        warmup=40,
        rate=3e-3,
        betas=(0.9, 0.999),
        decay=0.02,
        smoothing=0.05,
        val_every=88,
        save_every=88,
        log_every=20,
    ),
    "vit": Task(
        config="digits_vit.py",
        changes=(LOCAL,),
        outputs=10,
        batch=64,
        steps=1200,
        warmup=100,
        rate=3e-3,
        betas=(0.9, 0.98),
        decay=0.05,
        smoothing=0.05,
        val_every=200,
        save_every=400,
        log_every=50,
    ),
    "text": Task(
        config="lm.py:toy",
        changes=(
            LOCAL,
            MODULE,
            "precision=None",
            "parallel={'type': 'SingleDevice', '_delete_': True}",
            "train_cfg.max_iters=600",
            "train_cfg.val_interval=100",
            "default_hooks.checkpoint.interval=200",
        ),
        outputs=256,
        batch=16,
        steps=600,
        warmup=20,
        rate=5e-3,
        betas=(0.9, 0.95),
        decay=0.1,
        smoothing=0.0,
        val_every=100,
        save_every=200,
        log_every=20,
    ),
}


class Data(NamedTuple):
    """Hold the arrays of a task, with examples along the first axis."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def read_arguments():
    """Return `(name, task, data, directory)` of this process: `python FILE NAME DATA DIRECTORY`."""
    name, file, directory = sys.argv[1:]
    with np.load(file) as arrays:
        data = Data(*((arrays[f"{split}_x"], arrays[f"{split}_y"]) for split in ("train", "test")))
    return name, TASKS[name], data, pathlib.Path(directory)


def iterate(data, task, seed=0):
    """Yield `task.steps` training batches `(x, y)`, in a new order in each epoch."""
    x, y = data.train
    rng = np.random.default_rng(seed)
    step = 0
    while step < task.steps:
        order = rng.permutation(len(x))
        for start in range(0, len(x) - task.batch + 1, task.batch):
            chosen = order[start : start + task.batch]
            yield x[chosen], y[chosen]
            step += 1
            if step == task.steps:
                return


def rate_factor(step, task):
    """Return the factor of the learning rate at an iteration: linear, then a cosine to 0."""
    if step < task.warmup:
        return (step + 1) / task.warmup
    share = (step - task.warmup) / (task.steps - task.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def has_decay(path, ndim):
    """Tell whether a parameter is decayed: matrices and kernels are, embeddings are not."""
    return ndim > 1 and not any(part in path.lower() for part in ("embed", "pos", "cls"))


def write_result(directory, metric):
    """Write the metric of the last validation."""
    (directory / "result.json").write_text(json.dumps({"metric": float(metric)}))


class Log:
    """Write the loss as lines of JSON."""

    def __init__(self, directory):
        os.makedirs(directory, exist_ok=True)
        self._file = open(directory / "log.jsonl", "w", buffering=1)  # noqa: SIM115 - until the end

    def write(self, **values):
        """Write a line."""
        self._file.write(json.dumps(values) + "\n")
