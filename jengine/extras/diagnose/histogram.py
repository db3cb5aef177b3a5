"""Histograms of gradients and weights, computed in the step."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config import paths
from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.convert import Histogram
from jengine.logging.visualizer import Visualizer
from jengine.train.traced_hooks import StepContext

PyTree = Any


class BinnedArray(NamedTuple):
    """Distribution of the finite elements in an array, on the device."""

    counts: jax.Array  # int32[B]
    low: jax.Array  # f32[], the least element
    high: jax.Array  # f32[], the greatest
    mean: jax.Array  # f32[]
    std: jax.Array  # f32[]


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class HistogramHook(Hook):
    """Histograms of the gradients and the weights of each parameter, every `interval` iterations.

    They are computed inside the step, only in the iterations that are due, and written to the
    visualizer in the background as `gradients/<path>` and `weights/<path>`: TensorBoard and W&B
    draw them, other backends get the mean, the standard deviation and the range. With gradient
    accumulation the gradients are those of one iteration.

    Args:
      interval: iterations between two records.
      bins: number of bins.
      gradients: whether to record gradients, before clipping.
      weights: whether to record weights, after the update.
      patterns: regular expressions, one of which must be found in the dotted path of a parameter;
        None for all.

    Raises:
      ConfigError: nothing to record, or, before training, patterns that match no parameter.

    Examples:
      >>> HistogramHook(interval=1000, patterns=["kernel$"]).get_traced_points()
      ['traced_grads', 'traced_update', 'traced_accumulate']
    """

    is_single = True

    interval: Count = 500
    bins: Count = 64
    gradients: bool = True
    weights: bool = True
    patterns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self.every = self.interval
        if not self.gradients and not self.weights:
            raise ConfigError(
                "HistogramHook: one of gradients and weights must be True, got False and False"
            )

    # --- In the step. ---

    def init_traced_state(self, params: PyTree, model_state: PyTree) -> dict[str, PyTree]:
        """Return empty histograms of the selected parameters."""
        found = [path for path in paths.flatten(params) if self._is_selected(path)]
        if not found:
            raise ConfigError(
                f"HistogramHook: patterns must match a parameter, got {self.patterns}"
            )
        kinds = [name for name in ("gradients", "weights") if getattr(self, name)]
        return {kind: paths.nest({path: _empty(self.bins) for path in found}) for kind in kinds}

    def traced_grads(self, ctx: StepContext) -> StepContext:
        """Record the gradients if they are due."""
        return self._record(ctx, "gradients", ctx.grads, ctx.axis_name) if self.gradients else ctx

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Record the weights if they are due."""
        return self._record(ctx, "weights", ctx.params, None) if self.weights else ctx

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Record the weights if they are due."""
        return self.traced_update(ctx)

    def _record(
        self, ctx: StepContext, kind: str, tree: PyTree, axis_name: str | None
    ) -> StepContext:
        state = ctx.hook_state
        # With several optimizers the gradients are those of some parameters.
        arrays = {
            path: leaf for path, leaf in paths.flatten(tree).items() if self._is_selected(path)
        }

        def compute() -> PyTree:
            new = {
                path: bin_elements(array, self.bins, axis_name) for path, array in arrays.items()
            }
            return paths.nest({**_flatten(state[kind]), **new})

        is_due = (ctx.step + 1) % self.interval == 0
        return ctx.replace(
            hook_state={**state, kind: jax.lax.cond(is_due, compute, lambda: state[kind])}
        )

    def _is_selected(self, path: str) -> bool:
        return self.patterns is None or any(re.search(pattern, path) for pattern in self.patterns)

    # --- On the host. ---

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Write the histograms."""
        # A copy: the next step donates the state, maybe before the writer has fetched it
        state = jax.tree.map(jnp.copy, runner.state.hook_state[type(self).__name__])
        runner.log_writer.submit(_write, runner.visualizer, state, runner.iter + 1)


def bin_elements(array: jax.Array, bins: int, axis_name: str | None = None) -> BinnedArray:
    """Return the distribution of an array with equal bins between its extremes, as
    `numpy.histogram` does.

    >>> bin_elements(jnp.array([0.0, 1.0, 1.0, jnp.nan]), bins=2).counts
    Array([1, 2], dtype=int32)

    Args:
      array: floating, of any shape.
      bins: number of bins.
      axis_name: a mapped axis over which the elements are counted together.
    """
    lanes = (lambda x, reduce: reduce(x, axis_name)) if axis_name else (lambda x, reduce: x)
    x = array.astype(jnp.float32)
    finite = jnp.isfinite(x)
    low = lanes(jnp.where(finite, x, jnp.inf).min(initial=jnp.inf), jax.lax.pmin)
    high = lanes(jnp.where(finite, x, -jnp.inf).max(initial=-jnp.inf), jax.lax.pmax)
    # no finite element
    low, high = jnp.where(low > high, 0.0, low), jnp.where(low > high, 0.0, high)
    # numpy.histogram widens an empty range by one half to both sides
    start = jnp.where(low == high, low - 0.5, low)
    width = jnp.where(low == high, 1.0, high - low)
    index = jnp.clip(((x - start) / width * bins).astype(jnp.int32), 0, bins - 1)
    # A sum of comparisons, since a scatter is slow on accelerators and would gather shards
    hits = (index[..., None] == jnp.arange(bins)) & finite[..., None]
    counts = lanes(hits.sum(axis=tuple(range(x.ndim)), dtype=jnp.int32), jax.lax.psum)
    number = jnp.maximum(counts.sum(), 1).astype(jnp.float32)
    mean = lanes(jnp.where(finite, x, 0.0).sum(), jax.lax.psum) / number
    variance = lanes(jnp.where(finite, jnp.square(x - mean), 0.0).sum(), jax.lax.psum) / number
    return BinnedArray(counts, low, high, mean, jnp.sqrt(variance))


def _empty(bins: int) -> BinnedArray:
    return BinnedArray(jnp.zeros(bins, jnp.int32), *(jnp.zeros((), jnp.float32) for _ in range(4)))


def _flatten(tree: PyTree) -> dict[str, BinnedArray]:
    nodes = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, BinnedArray)
    )[0]
    return {paths.dotted(path): node for path, node in nodes}


def to_histogram(binned: BinnedArray) -> Histogram:
    """Return a fetched distribution as a histogram."""
    edges = np.histogram_bin_edges(
        np.asarray([binned.low, binned.high], np.float64), len(binned.counts)
    )
    return Histogram(
        np.asarray(binned.counts, np.int64), edges, float(binned.mean), float(binned.std)
    )


def _write(visualizer: Visualizer, state: dict[str, PyTree], step: int) -> None:
    """Fetch the histograms and write them to all backends."""
    for kind, tree in jax.device_get(state).items():
        for path, binned in _flatten(tree).items():
            visualizer.add_histogram(f"{kind}/{path}", to_histogram(binned), step)
