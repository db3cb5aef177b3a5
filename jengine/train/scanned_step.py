"""Build a chunk: several training steps in one `lax.scan`, and its metrics."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jengine.train.state import TrainState
from jengine.train.step import Metrics, TrainStep

PyTree = Any
ScannedStep = Callable[[TrainState, PyTree, PyTree, jax.Array], tuple[TrainState, "ScannedMetrics"]]


class ScannedMetrics(struct.PyTreeNode):
    """Hold the metrics of the K steps of a chunk.

    Attributes:
      values: real[K] by name; NaN (0 for integers) where a step does not report the name.
      update_only: names that only steps that update report.
    """

    values: dict[str, jax.Array]
    update_only: tuple[str, ...] = struct.field(pytree_node=False)


def build_scanned_step(update: TrainStep, accumulate: TrainStep | None = None) -> ScannedStep:
    """Build `chunk(state, batches, hyperparams, is_update) -> (state, metrics)`, pure and not compiled.

    The steps run in a loop on the device, with the operations, and thus the results, of a call for each step.

    Args:
      update: the step that updates the parameters.
      accumulate: the step that only accumulates gradients, for a run that has such steps.

    Returns:
      The chunk. Its arguments are the state, the batches and hyperparameters with a leading axis [K], and
      `is_update`: bool[K], True for the steps that update (ignored without `accumulate`).
    """

    def chunk(
        state: TrainState, batches: PyTree, hyperparams: PyTree, is_update: jax.Array
    ) -> tuple[TrainState, ScannedMetrics]:
        """Run K steps."""
        first = jax.tree.map(lambda x: x[0], (batches, hyperparams))
        by_update = jax.eval_shape(update, state, *first)[1]
        by_accumulate = by_update if accumulate is None else jax.eval_shape(accumulate, state, *first)[1]
        names = {**by_update, **by_accumulate}

        def body(state: TrainState, inputs: tuple[PyTree, PyTree, jax.Array]) -> tuple[TrainState, Metrics]:
            batch, hyperparams, updates = inputs
            if accumulate is None:
                return update(state, batch, hyperparams)
            branches = _reporting(update, names), _reporting(accumulate, names)
            return jax.lax.cond(updates, *branches, state, batch, hyperparams)

        state, values = jax.lax.scan(body, state, (batches, hyperparams, is_update))
        return state, ScannedMetrics(values, tuple(name for name in by_update if name not in by_accumulate))

    return chunk


def _reporting(step: TrainStep, names: Metrics) -> TrainStep:
    """Return the step with missing metrics filled with NaN, so that both kinds of steps have the same outputs."""

    def run(state: TrainState, batch: PyTree, hyperparams: PyTree) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, batch, hyperparams)
        return state, {
            name: metrics[name] if name in metrics else _missing(like.shape, like.dtype) for name, like in names.items()
        }

    return run


def _missing(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)


@dataclasses.dataclass(frozen=True)
class ChunkMetrics:
    """Hold the metrics of the K steps of a chunk.

    Attributes:
      values: real[K] by name, device arrays that may be pending.
      is_update: bool[K], which steps updated the parameters.
      update_only: names that only steps that update report; their other values are undefined.
    """

    values: Mapping[str, jax.Array]
    is_update: np.ndarray
    update_only: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """The number of steps K."""
        return len(self.is_update)

    def reported(self, name: str) -> np.ndarray | None:
        """Return which steps report the metric, bool[K]; None for all of them."""
        return self.is_update if name in self.update_only else None

    def last(self) -> dict[str, jax.Array]:
        """Return the metrics of the last step, as a call of that step alone returns them."""
        names = (name for name in self.values if name not in self.update_only or self.is_update[-1])
        return {name: self.values[name][-1] for name in names}
