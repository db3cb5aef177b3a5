"""Chunks: several training steps in one `lax.scan`."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jengine.train.hyperparams import HyperparamsVector
from jengine.train.state import TrainState
from jengine.train.step import Gradients, Metrics, TrainStep

PyTree = Any
ScannedStep = Callable[[TrainState, PyTree, PyTree, jax.Array], tuple[TrainState, "ScannedMetrics"]]


class ScannedMetrics(struct.PyTreeNode):
    """Result of a compiled chunk with K steps.

    `ChunkMetrics` adds which of them report each metric.

    Attributes:
      values: real[K] by name; NaN (0 for integers) where a step does not report the name.
      update_only: names that are reported only by steps that update.
    """

    values: dict[str, jax.Array]
    update_only: tuple[str, ...] = struct.field(pytree_node=False)


def build_scanned_step(update: TrainStep, accumulate: TrainStep | None = None) -> ScannedStep:
    """Build `chunk(state, batches, hyperparams, is_update) -> (state, metrics)`, pure and not
    compiled.

    The steps run in a loop on the device, with the same operations and results as a call for each
    step. Gradients are computed and accumulated outside of the branch between an update and an
    accumulation. There XLA can overlap the exchange between devices with the computation, and
    rounds sums as in a single step.

    Args:
      update: the step that updates the parameters.
      accumulate: the step that only accumulates gradients, if the run has such steps.

    Returns:
      The chunk. Its arguments are the state, the batches and hyperparameters with a leading axis
      [K], and `is_update`: bool[K], True for the steps that update (ignored without `accumulate`).
      `constants` of the hyperparameters have no such axis.
    """

    def chunk(
        state: TrainState, batches: PyTree, hyperparams: PyTree, is_update: jax.Array
    ) -> tuple[TrainState, ScannedMetrics]:
        """Run K steps."""
        constants = hyperparams.constants if isinstance(hyperparams, HyperparamsVector) else {}
        if constants:
            hyperparams = dataclasses.replace(hyperparams, constants={})

        def of_step(inputs: PyTree) -> PyTree:
            batch, hyperparams, *rest = inputs
            if constants:
                hyperparams = dataclasses.replace(hyperparams, constants=constants)
            return batch, hyperparams, *rest

        # only for its shapes
        first = of_step(jax.tree.map(lambda x: x[0], (batches, hyperparams)))
        update_metrics = jax.eval_shape(update, state, *first)[1]  # traced, but not compiled
        accumulate_metrics = (
            update_metrics if accumulate is None else jax.eval_shape(accumulate, state, *first)[1]
        )
        all_metrics = update_metrics | accumulate_metrics  # ordered: JAX would sort a dict's names

        def body(
            state: TrainState, inputs: tuple[PyTree, PyTree, jax.Array]
        ) -> tuple[TrainState, Metrics]:
            batch, hyperparams, is_update = of_step(inputs)
            if accumulate is None:
                return update(state, batch, hyperparams)
            gradients = update.differentiate(state, batch, hyperparams)
            branches = (
                _fill_missing(update.finish, all_metrics),
                _fill_missing(accumulate.finish, all_metrics),
            )
            state, metrics = jax.lax.cond(is_update, *branches, state, gradients)
            # the carry keeps its shardings, whatever XLA chose in a branch
            return update.constrain(state, ""), metrics

        state, values = jax.lax.scan(body, state, (batches, hyperparams, is_update))
        return state, ScannedMetrics(
            values, tuple(name for name in update_metrics if name not in accumulate_metrics)
        )

    return chunk


def _fill_missing(
    finish: Callable[..., tuple[TrainState, Metrics]], all_metrics: Metrics
) -> Callable[..., Any]:
    """Return `finish` with missing metrics filled with NaN, so that both kinds of steps have the
    same outputs.
    """

    def run(state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
        state, metrics = finish(state, gradients)
        return state, OrderedDict(  # what a step does not report is never read on the host
            (name, metrics[name] if name in metrics else missing(metric))
            for name, metric in all_metrics.items()
        )

    def missing(like: Any) -> jax.Array:
        return jnp.full(
            like.shape, jnp.nan if jnp.issubdtype(like.dtype, jnp.inexact) else 0, like.dtype
        )

    return run


@dataclasses.dataclass(frozen=True)
class ChunkMetrics:
    """Metrics of a chunk with K steps.

    >>> metrics = ChunkMetrics({"loss": np.array([3.0, 2.0])})
    >>> float(metrics.at(1)["loss"])
    2.0

    Attributes:
      values: real[K] by name, device arrays that may be pending.
      reports: bool[K] by name, for metrics that some steps do not report: there the values are
        undefined.
    """

    values: Mapping[str, jax.Array]
    reports: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def at(self, index: int) -> "StepMetrics":
        """Return the metrics of one step, as if that step had been called alone."""
        return StepMetrics(self, index)


@jax.tree_util.register_pytree_node_class
class StepMetrics(Mapping[str, jax.Array]):
    """Metrics of one step in a chunk, which are sliced when they are read."""

    def __init__(self, chunk: ChunkMetrics, index: int) -> None:
        self.chunk = chunk
        self.index = index

    def __getitem__(self, name: str) -> jax.Array:
        if name in self.chunk.reports and not self.chunk.reports[name][self.index]:
            raise KeyError(name)
        return self.chunk.values[name][self.index]

    def __iter__(self) -> Iterator[str]:
        reports = self.chunk.reports
        return (x for x in self.chunk.values if x not in reports or reports[x][self.index])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def tree_flatten(self) -> tuple[list[jax.Array], tuple[str, ...]]:
        """Return the values and the names, for JAX."""
        return list(self.values()), tuple(self)

    @staticmethod
    def tree_unflatten(names: tuple[str, ...], values: Iterable[Any]) -> dict[str, Any]:
        """Return a dict of other values."""
        return dict(zip(names, values, strict=True))
