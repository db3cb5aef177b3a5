"""Train as one of two processes, lose the disk of the second one and all checkpoints, and train on from the copies:
`replaced_disk.py DIRECTORY ADDRESS INDEX`. The checkpoint of the first run is kept as DIRECTORY/expected.
"""

import os
import pathlib
import shutil
import sys

import jax.numpy as jnp
import numpy as np

from jengine import Runner
from jengine.data import ArrayDataset
from jengine.model import FunctionalModel
from jengine.parallel import launch
from jengine.parallel.processes import get_processes

ITERATIONS = 12


def train(work_dir):
    x = np.random.default_rng(0).standard_normal((32, 4), np.float32)
    Runner(
        FunctionalModel(
            init=lambda: {"w": jnp.zeros(4), "b": jnp.zeros((), jnp.bfloat16)},
            loss=lambda params, batch: jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"]),
        ),
        work_dir,
        train_dataloader=dict(batch_size=4, dataset=ArrayDataset(dict(x=x, y=x.sum(axis=1)))),
        train_cfg=dict(by_epoch=False, max_iters=ITERATIONS),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.1)),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=-1), logger=None),
        custom_hooks=[dict(type="LocalCheckpointHook", directory="$JENGINE_TEST_DISK", interval=5)],
        parallel=dict(type="Pjit", mesh=dict(data=1, fsdp=2), fsdp_min_size=1),
        resume=True,
    ).train()


def main(directory, address, index):
    launch("none", address, 2, index, timeout=60, heartbeat_timeout=10)
    disk = directory / f"disk_{index}"
    os.environ["JENGINE_TEST_DISK"] = str(disk)
    train(directory / "run")
    if index == 0:
        shutil.move(directory / "run" / f"iter_{ITERATIONS}", directory / "expected")
        (directory / "run" / "last_checkpoint").unlink()
    else:
        shutil.rmtree(disk)
    get_processes().all_gather("the lost files", index)
    train(directory / "run")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
