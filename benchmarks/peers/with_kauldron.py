"""Kauldron, with its writer of metrics."""

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
from benchmarks.peers.common import BATCH, CLASSES, HIDDEN, ITERS_OF_SLOW, LOG_EVERY, MOMENTUM, RATE, compare


class Net(nn.Module):
    """The network."""

    x: kd.kontext.Key = kd.kontext.REQUIRED

    @nn.compact
    def __call__(self, x):
        """Logits."""
        return nn.Dense(CLASSES)(jnp.tanh(nn.Dense(HIDDEN)(x)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline(kd.data.Pipeline):
    """The batches as they are."""

    data: Any

    def __iter__(self):
        batches = itertools.chain(self.data, self.data)  # it asks for more than it trains on
        return kd.data.iterators.NonCheckpointableIterator(source=self, iter=batches)


def run(data):
    """Trains over the data once."""
    with tempfile.TemporaryDirectory() as work_dir:
        kd.train.Trainer(
            seed=0,
            workdir=work_dir,
            train_ds=Pipeline(data=data, batch_size=BATCH),
            model=Net(x="batch.x"),
            optimizer=optax.sgd(RATE, momentum=MOMENTUM),
            train_losses={
                "loss": kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds", labels="batch.y"),
            },
            num_train_steps=len(data),
            log_metrics_every=LOG_EVERY,
            log_summaries_every=10**9,
        ).train()


def pack(x, y):
    """A batch as the model takes it; the loss wants an axis more."""
    return {"x": x, "y": y[:, None]}


compare({"bare": bare_jax.LOOP, "trainer": (run, pack)}, importlib.metadata.version("kauldron"), iters=ITERS_OF_SLOW)
