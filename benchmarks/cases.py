"""Define the cases of the speed and memory benchmarks: three networks from tiny to small, and their
data.

A case provides its network twice: as a `Model` for the Runner, and as a plain loss function for the
  hand-written loop.
The two share no code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jengine.extras.networks.networks import SmallCNN, SmallViT
from jengine.model import CrossEntropy, LinenModel

SCHEDULE = 1_000_000  # iterations of the cosine schedule: more than any benchmark runs


class TinyMLP(nn.Module):
    """Define an MLP with one hidden layer, so small that dispatch dominates the step."""

    @nn.compact
    def __call__(self, image, train=False):
        """Compute logits f[B, 10] of vectors f[B, 32]."""
        return nn.Dense(10)(jnp.tanh(nn.Dense(32)(image)))


@dataclasses.dataclass(frozen=True)
class Case:
    """Describe a network, its data, and the size of its measurements.

    Attributes:
      name: the name of the case in tables and in ratios.json.
      module: the Linen module.
      shape: the shape of an example.
      batch_size: examples per batch.
      optimizer: the optimizer config for the Runner.
      make_tx: schedule -> the same optimizer in optax.
      block: iterations per time measurement.
      turns: blocks of each loop in a round.
      chunks: chunk sizes to measure in addition to single steps.
    """

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    batch_size: int
    optimizer: dict[str, Any]
    make_tx: Callable[[Any], optax.GradientTransformation]
    block: int
    turns: int
    chunks: tuple[int, ...] = ()

    def batches(self, count=16):
        """Return host batches, several so that no batch stays in a CPU cache."""
        rng = np.random.default_rng(0)
        images = rng.standard_normal((count, self.batch_size, *self.shape), np.float32)
        labels = rng.integers(0, 10, (count, self.batch_size)).astype(np.int32)
        return [{"image": images[i], "label": labels[i]} for i in range(count)]

    def model(self):
        """Return the network as a `Model` for the Runner."""
        return LinenModel(self.module, CrossEntropy())

    def init(self, batch):
        """Initialize `(params, batch_stats)` for the hand-written loop."""
        variables = jax.jit(self.module.init)(jax.random.key(0), batch["image"])
        return variables["params"], variables.get("batch_stats", {})

    def loss(self, params, batch_stats, batch):
        """Compute `(loss, batch_stats)` for the hand-written loop."""
        variables = (
            {"params": params, "batch_stats": batch_stats} if batch_stats else {"params": params}
        )
        logits, updates = self.module.apply(
            variables, batch["image"], train=True, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy(
            logits, jax.nn.one_hot(batch["label"], logits.shape[-1])
        )
        return losses.mean(), updates.get("batch_stats", {})

    def tx(self):
        """Build the optimizer with its schedule in optax."""
        return self.make_tx(optax.cosine_decay_schedule(self.optimizer["lr"], SCHEDULE))


def adamw(schedule):
    """Build the optax equivalent of `AdamW` in the Runner config."""
    return optax.adamw(schedule, weight_decay=0.01)


def momentum(schedule):
    """Build the optax equivalent of `SGD` with momentum in the Runner config."""
    return optax.sgd(schedule, momentum=0.9)


ADAMW = dict(type="AdamW", lr=1e-4, weight_decay=0.01)
SGD = dict(type="SGD", lr=1e-3, momentum=0.9)
VIT = SmallViT(patch=8, width=192, depth=12, heads=3, mlp_ratio=4)
CASES = [
    Case("mlp", TinyMLP(), (32,), 32, SGD, momentum, block=1000, turns=5, chunks=(10, 100)),
    Case("cnn", SmallCNN(widths=(16, 32)), (16, 16, 3), 32, ADAMW, adamw, block=50, turns=15),
    Case("vit", VIT, (32, 32, 3), 4, ADAMW, adamw, block=10, turns=9, chunks=(10,)),
]
