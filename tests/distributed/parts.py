"""Small trainings that two processes run one after the other: `python -m tests.distributed.parts DIR NAMES ADDRESS INDEX`.

Each returns arrays of this process; one process alone with as many devices returns the same.
"""

import pathlib
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jengine.contrib.selfsup import PseudoLabelDataset
from jengine.data import ArrayDataset
from jengine.distributed import launch
from jengine.hooks import Hook
from jengine.model import LinenModel
from jengine.runner import Runner
from tests.contrib.selfsup import test_odc_hook, test_swav_hook

X = np.random.RandomState(0).randn(64, 8).astype(np.float32)
Y = X @ np.random.RandomState(1).randn(8, 4).astype(np.float32)
BATCH = 16  # rows of all processes


class Net(nn.Module):
    """Two layers with a BatchNorm between them."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(16, use_bias=False, name="up")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="bn")(x)
        return nn.Dense(4, name="down")(jnp.tanh(x))


def squared_error(outputs, batch):
    return jnp.square(outputs - batch["y"]).mean(axis=-1)


def as_read_by_two(rows):
    """The rows in the order in which one process finds in each batch what two read, those of the first in front."""
    return rows.reshape(-1, BATCH // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def local(array):
    """The rows on the devices of this process, in order."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def make(work_dir, x=X, **changes):
    count = jax.process_count()
    x, y = (x, Y) if count == 2 else (as_read_by_two(x), as_read_by_two(Y))
    arguments = dict(
        model=LinenModel(Net(), squared_error, inputs="x"),
        work_dir=work_dir,
        train_dataloader=dict(
            batch_size=BATCH // count,
            dataset=ArrayDataset(dict(x=x, y=y)),
            sampler=dict(type="DefaultSampler", shuffle=False),
        ),
        train_cfg=dict(max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.05, momentum=0.9), clip_grad=dict(max_norm=1.0)),
        default_hooks=dict(checkpoint=None, logger=None),
    )
    return Runner(**{**arguments, **changes})


class Statistics(Hook):
    """Keeps the BatchNorm's means of this process's replicas after an iteration and at the end of an epoch."""

    priority = "LOWEST"

    def __init__(self):
        self.found = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 2:
            self._keep(runner, "within an epoch")

    def before_train_epoch(self, runner):
        if runner.epoch == 1:
            self._keep(runner, "after an epoch")

    def _keep(self, runner, when):
        self.found[when] = local(runner.state.model_state["batch_stats"]["bn"]["mean"])


def replicas(work_dir, devices, **changes):
    """Everything that a replica has: own statistics, accumulation, averages, checkpoints."""
    statistics = Statistics()
    count = jax.process_count()
    runner = make(
        work_dir,
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=0.05, momentum=0.9), clip_grad=dict(max_norm=1.0), accumulative_counts=2
        ),
        val_dataloader=dict(batch_size=4 // count, dataset=ArrayDataset(dict(x=X[:12], y=Y[:12]))),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=squared_error),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=-1), logger=None),
        custom_hooks=[dict(type="SyncBuffersHook"), dict(type="EMAHook", momentum=0.1), statistics],
        parallel=dict(type="DataParallel", devices=devices),
        **changes,
    )
    state = runner.train()
    average = state.hook_state["EMAHook"].params
    validated = {name: value for _, _, metrics in runner.validations for name, value in metrics.items()}
    return {**flat("params", state.params), **flat("average", average), **statistics.found, **validated}


def sharded(work_dir, devices):
    """Parameters and optimizer divided over all devices of all processes; an epoch in two calls of the step."""
    runner = make(
        work_dir,
        train_cfg=dict(max_epochs=2, steps_per_call=3),
        parallel=dict(type="Pjit", mesh=dict(data=1, fsdp=devices), fsdp_min_size=1, devices=devices),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=2), logger=None),
    )
    state = runner.train()
    return {"up": local_part(state.params["up"]["kernel"])}


def local_part(array):
    """The array with NaN where another process has it."""
    whole = np.full(array.shape, np.nan, np.float32)
    for shard in array.addressable_shards:
        whole[shard.index] = shard.data
    return whole


def guarded(work_dir, devices, nans=(33,), steps_per_call=1, **settings):
    """A NaN in a sample that process 1 reads: it is in the third batch."""
    x = X.copy()
    x[list(nans)] = np.nan
    runner = make(
        work_dir,
        x=x,
        train_cfg=dict(max_epochs=2, steps_per_call=steps_per_call),
        custom_hooks=[dict(type="NumericsGuardHook", **{"interval": 1, **settings})],
        parallel=dict(type="DataParallel", devices=devices),
    )
    state = runner.train()
    return {**flat("params", state.params), "dropped": np.asarray(state.hook_state["NumericsGuardHook"].dropped)}


def swav(work_dir, devices):
    """A queue of SwAV."""
    count = jax.process_count()
    x = np.random.RandomState(0).randn(32, 5).astype(np.float32)
    own = dict(type="SwAVHook", batch_size=BATCH // count, feat_dim=4, queue_length=32, epoch_queue_starts=1)
    runner, _ = test_swav_hook.train(
        work_dir,
        epochs=3,
        train_dataloader=dict(
            batch_size=BATCH // count,
            dataset=ArrayDataset(dict(x=x if count == 2 else as_read_by_two(x))),
            sampler=dict(type="DefaultSampler", shuffle=False),
        ),
        custom_hooks=[dict(own, priority="VERY_HIGH")],
        parallel=dict(type="Pjit", devices=devices),
    )
    return {"queue": np.asarray(runner.state.hook_state["SwAVHook"].rows)}


def odc(work_dir, devices):
    """ODC's memory, filled by a clustering."""
    loader = dict(batch_size=4 // jax.process_count(), dataset=PseudoLabelDataset(test_odc_hook.samples()))
    runner = test_odc_hook.make(
        work_dir, test_odc_hook.SETTINGS, train_dataloader=loader, parallel=dict(type="Pjit", devices=devices)
    )
    state = runner.train()
    bank = state.model_state["bank"]
    return {"labels": np.asarray(bank.labels), "features": np.asarray(bank.features), **flat("params", state.params)}


def flat(name, tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {f"{name}{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}


def ending(work_dir, devices):
    """Three batches with a NaN in a row, one more than the guard lets pass, and all in one call of the step."""
    return guarded(work_dir, devices, nans=(17, 33, 49), max_in_row=2, interval=4, steps_per_call=4)


def main():
    folder, names, address, index = pathlib.Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3], int(sys.argv[4])
    launch("none", address, 2, index, timeout=60)
    for name in names:
        np.savez(folder / f"{name}_{index}.npz", **globals()[name](folder / name, jax.device_count()))


if __name__ == "__main__":
    main()
