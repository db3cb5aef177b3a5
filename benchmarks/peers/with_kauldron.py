"""Measure Kauldron with its metric writer."""

import dataclasses
import importlib.metadata
import itertools
import tempfile
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import optax
from kauldron import kd

from benchmarks.peers import bare_jax
from benchmarks.peers.common import (
    BATCH,
    CLASSES,
    HIDDEN,
    LOG_EVERY,
    MOMENTUM,
    RATE,
    SLOW_ITERS,
    compare,
)


class Net(nn.Module):
    """Define the network."""

    x: kd.kontext.Key = kd.kontext.REQUIRED

    @nn.compact
    def __call__(self, x):
        """Compute the logits."""
        return nn.Dense(CLASSES)(jnp.tanh(nn.Dense(HIDDEN)(x)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline(kd.data.Pipeline):
    """Yield the batches unchanged."""

    data: Any

    def __iter__(self):
        # the trainer prefetches beyond the last step
        batches = itertools.chain(self.data, self.data)
        return kd.data.iterators.NonCheckpointableIterator(source=self, iter=batches)


def run(data):
    """Train on the data once."""
    with tempfile.TemporaryDirectory() as work_dir:
        kd.train.Trainer(
            seed=0,
            workdir=work_dir,
            train_ds=Pipeline(data=data, batch_size=BATCH),
            model=Net(x="batch.x"),
            optimizer=optax.sgd(RATE, momentum=MOMENTUM),
            train_losses={
                "loss": kd.losses.SoftmaxCrossEntropyWithIntLabels(
                    logits="preds", labels="batch.y"
                ),
            },
            num_train_steps=len(data),
            log_metrics_every=LOG_EVERY,
            log_summaries_every=10**9,
        ).train()


def pack(x, y):
    """Convert a batch for the model; the loss requires labels of shape [B, 1]."""
    return {"x": x, "y": y[:, None]}


compare(
    {"bare": bare_jax.LOOP, "trainer": (run, pack)},
    importlib.metadata.version("kauldron"),
    iters=SLOW_ITERS,
)
