"""Metrics as three functions over a state on the device, or as a collection of examples on the
host.

`example_mask`, `element_mask` and `drop_padding` exclude padded examples. `Counts`, `Sum` and
`Mean` are states whose results do not depend on the batch size.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config.annotations import checked
from jengine.data.host_entries import Batch
from jengine.data.masking import are_whole, get_mask
from jengine.model.model import ArrayTree
from jengine.model.selection import Selector, select_array

# Arrays with a leading batch axis, by name or in order, as the model's `predict` returns them
Predictions: TypeAlias = (
    "jax.Array | np.ndarray | Mapping[str, Predictions] | Sequence[Predictions]"
)
# (results of a process, metric name) -> results of all processes
Gather = Callable[[list[Any], str], list[Any]]


class PlacedResult(NamedTuple):
    """Result of a `HostMetric` with the position of its example in the dataset."""

    position: int
    result: Any


class BaseMetric:
    """Metric from sums: `init` creates a state, `update` adds a batch to it, `compute` returns the
    results.

    `init` and `update` are pure. `update` is compiled into the evaluation step, so the state stays
    on the device and is transferred to the host once, at the end. It must respect the batch mask,
    see `example_mask`.

    Args:
      prefix: prefix for result names, `prefix/name`; by default the class attribute
        `default_prefix`.

    Examples:
      >>> class PositiveRate(BaseMetric):
      ...     def init(self):
      ...         return Mean.zero()
      ...
      ...     def update(self, state, predictions, batch):
      ...         mask = example_mask(batch)
      ...         return state.add(((predictions > 0) & mask).sum(), mask.sum())
      ...
      ...     def compute(self, state):
      ...         return {"positive": state.value()}
      >>> metric, batch = PositiveRate(), {"x": jnp.zeros(4)}
      >>> metric.compute(metric.update(metric.init(), jnp.array([1, 2, 3, -1]), batch))
      {'positive': 0.75}
    """

    default_prefix: str | None = None
    on_host = False  # whether the examples are collected on the host, see `HostMetric`
    has_results = True  # False for a metric that only writes a file

    def __init_subclass__(cls) -> None:
        """Check that a metric on the host, as MMEngine's are, derives from `HostMetric`."""
        if not cls.on_host and {"process", "compute_metrics"} <= set(vars(cls)):
            raise TypeError(
                f"{cls.__name__} must derive from HostMetric, since it has `process` and "
                "`compute_metrics`; one in the compiled step has `init`, `update` and `compute`"
            )
        checked(cls)  # so that the work dir's config has the metrics of a run in Python

    def __init__(self, prefix: str | None = None) -> None:
        self.prefix = self.default_prefix if prefix is None else prefix
        self.dataset_meta: Mapping[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The result names without prefix; empty if they are not known before the evaluation."""
        return ()

    def init(self) -> Any:
        """Return the initial state: a pytree of zeros."""
        raise NotImplementedError

    def update(self, state: Any, predictions: Predictions, batch: Batch) -> Any:
        """Return the state with a batch added; `predictions` and `batch` have a leading axis B."""
        raise NotImplementedError

    def compute(self, state: Any) -> dict[str, Any]:
        """Return the results by name, from a state whose leaves are NumPy arrays."""
        raise NotImplementedError

    def add_prefix(self, name: str) -> str:
        """Return the full name of a result, as used in logs and by `save_best`."""
        return f"{self.prefix}/{name}" if self.prefix else name


class PairMetric(BaseMetric):
    """Base class for metrics that compare a prediction with a label.

    Args:
      label: name, index or dotted path of the batch entry with the truth.
      prediction: the prediction entry; None if the predictions are an array.
      prefix: prefix for result names.
    """

    def __init__(
        self,
        label: Selector = "label",
        prediction: Selector | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(prefix)
        self.label = label
        self.prediction = prediction

    def select(self, predictions: Predictions, batch: Batch) -> tuple[Any, Any]:
        """Return the arrays with predictions and labels, as they are.

        KeyError for a missing entry.
        """
        name = type(self).__name__
        return (
            select_array(predictions, self.prediction, f"{name}.prediction", "predictions"),
            select_array(batch, self.label, f"{name}.label", "batch"),
        )


class HostMetric(BaseMetric):
    """Metric that is not a sum (a ranking, a matching, a file to write), from examples collected on
    the host.

    Every batch is transferred to the host, so you should implement a metric as a sum if possible.
    As in MMEngine, subclasses append to `self.results` in `process` and compute the results from
    all entries in `compute_metrics`. With several processes each calls `process` for its own
    examples, one by one, and process 0 calls `compute_metrics` with the entries of all, in the
    order of the dataset.
    """

    on_host = True

    def __init__(self, prefix: str | None = None) -> None:
        super().__init__(prefix)
        self.results: list[Any] = []
        # of the examples that the results belong to, where they must be ordered
        self._positions: list[int] = []

    def process(self, data_batch: Batch, data_samples: Predictions) -> None:
        """Append the entries for a batch to `self.results`.

        Args:
          data_batch: the batch without padding and mask, as NumPy arrays; a tuple if it is a list.
          data_samples: the predictions for these examples, as NumPy arrays.
        """
        raise NotImplementedError

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return the results by name, from the entries appended by all processes, in the order
        of the dataset.
        """
        raise NotImplementedError

    def process_placed(
        self, data_batch: Batch, data_samples: Predictions, positions: Sequence[int]
    ) -> None:
        """Process the examples one by one, such that `gather` can order the entries of all
        processes.

        Args:
          data_batch, data_samples: see `process`.
          positions: the positions of the examples in the dataset, int[B].
        """
        for i, position in enumerate(positions):
            # A whole batch may become one entry, in which the examples of other processes have no
            # place.
            self.process(
                *take_examples((data_batch, data_samples), slice(i, i + 1), len(positions))
            )
            self._positions += [int(position)] * (len(self.results) - len(self._positions))

    def init(self) -> Any:
        """Return an empty state: nothing is kept on the device."""
        return ()

    def update(self, state: Any, predictions: Predictions, batch: Batch) -> Any:
        """Return the state unchanged."""
        return state

    def clear(self) -> None:
        """Remove the entries."""
        self.results = []
        self._positions = []

    def gather(self, gather: Gather) -> None:
        """Replace `self.results` by the entries of all processes, ordered if their positions are
        known.
        """
        own: list[Any] = self.results
        if self._positions:
            own = [PlacedResult(*pair) for pair in zip(self._positions, self.results, strict=True)]
        self.clear()
        gathered = gather(own, type(self).__name__)
        if any(isinstance(value, PlacedResult) for value in gathered):
            gathered = [
                value.result for value in sorted(gathered, key=operator.attrgetter("position"))
            ]
        self.results = gathered

    def collect(self, gather: Gather | None) -> dict[str, Any]:
        """Return the results since the last call, and clear `self.results`.

        `gather` is None for a single process.
        """
        if gather is not None:
            self.gather(gather)
        # Cleared first: an error must not leave these examples to the next evaluation.
        results = self.results
        self.clear()
        return self.compute_metrics(results)


def example_mask(batch: Batch) -> jax.Array:
    """Return the mask of examples that are not padding, bool[B]: that in the batch (see
    `get_mask`), or all True.

    A batch that is passed on whole (`batch_axis=None`) counts as one example: bool[1].

    Raises:
      ValueError: the mask is not a vector, or the batch has neither a mask nor an array with a
        batch axis.
    """
    if are_whole():
        return jnp.ones(1, bool)
    mask = get_mask(batch)
    if mask is not None:
        if np.ndim(mask) != 1:
            raise ValueError(f"the `mask` of a batch must be bool[B], got shape {np.shape(mask)}")
        return jnp.asarray(mask, bool)
    sizes = [np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    if not sizes:
        raise ValueError("a batch must have at least one array with a leading batch axis, got none")
    return jnp.ones(sizes[0], bool)


def element_mask(batch: Batch, labels: jax.Array, ignore_index: int | None = None) -> jax.Array:
    """Return which labels, real[B, ...], count: those of real examples that are not
    `ignore_index`, bool[B, ...].
    """
    mask = jnp.broadcast_to(
        example_mask(batch).reshape(-1, *(1,) * (labels.ndim - 1)), labels.shape
    )
    return mask if ignore_index is None else mask & (labels != ignore_index)


def predict_class(scores: jax.Array) -> jax.Array:
    """Return the class with the highest score, int32[...] from float[..., C].

    Where a score is NaN it is C, which is no class: NaN would count as the highest score.

    >>> predict_class(jnp.array([[0.1, 0.9], [jnp.nan, 0.5]])).tolist()
    [1, 2]
    """
    return jnp.where(
        jnp.isnan(scores).any(axis=-1), scores.shape[-1], scores.argmax(axis=-1)
    ).astype(jnp.int32)


def drop_padding(tree: ArrayTree, mask: np.ndarray) -> Any:
    """Return `tree` with only the examples where `mask`, bool[B], is True.

    Leaves without axis B are not changed.
    """
    return take_examples(tree, mask, len(mask))


def take_examples(tree: ArrayTree, rows: np.ndarray | slice, count: int) -> Any:
    """Return `tree` with only the examples in `rows`.

    Leaves without the axis of `count` examples are not changed.
    """
    # Predictions may contain values that are not by example, such as a temperature.
    return jax.tree.map(lambda leaf: leaf[rows] if np.shape(leaf)[:1] == (count,) else leaf, tree)


class Counts(NamedTuple):
    """Exact counts up to 2**64: a run over large images passes the 2**31 of an int32."""

    low: jax.Array  # uint32[...], low words
    high: jax.Array  # uint32[...], high words

    @classmethod
    def zero(cls, *shape: int) -> "Counts":
        """Return zero counts."""
        return cls(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32))

    def add(self, index: tuple[jax.Array, ...], is_counted: jax.Array) -> "Counts":
        """Return the counts with one more at `index`, int[N] for each axis, where `is_counted`,
        bool[N]. Pure.
        """
        # A batch has fewer than 2**32 examples, so its own counts cannot wrap.
        added = jnp.zeros_like(self.low).at[index].add(is_counted.astype(jnp.uint32), mode="drop")
        low = self.low + added
        # a carry: the low word has wrapped around
        return Counts(low, self.high + (low < added).astype(jnp.uint32))

    def value(self) -> np.ndarray:
        """Return the counts as float64[...], on the host."""
        return np.asarray(self.low, np.float64) + np.asarray(self.high, np.float64) * 2.0**32


class Sum(NamedTuple):
    """Running sum and accumulated rounding error (Neumaier's variant of Kahan summation).

    The error in a plain float32 sum grows with the number of additions, so the result would depend
    on the batch size. This sum is accurate to float32 precision for any batch size, and exact for
    integers up to 2**47.
    """

    total: jax.Array  # float32[...]; float64[...] with `jax_enable_x64`
    lost: jax.Array  # like `total`, the rounding error in it

    @classmethod
    def zero(cls, *shape: int) -> "Sum":
        """Return empty sums."""
        return cls(jnp.zeros(shape, float), jnp.zeros(shape, float))

    def add(self, value: jax.Array) -> "Sum":
        """Return the sums with `value`, of any real dtype, added. Pure."""
        value = jnp.asarray(value).astype(self.total.dtype)
        total = self.total + value
        sum_is_larger = jnp.abs(self.total) >= jnp.abs(value)
        larger = jnp.where(sum_is_larger, self.total, value)
        # its low bits are those that an addition loses
        smaller = jnp.where(sum_is_larger, value, self.total)
        # XLA keeps the order of floating-point operations, so this is not simplified to 0.
        return Sum(total, self.lost + ((larger - total) + smaller))

    def value(self) -> Any:
        """Return the sums in double precision, on the host: a float, or float64[...]."""
        total = np.asarray(self.total, np.float64)
        lost = np.asarray(self.lost, np.float64)
        value = total + np.where(np.isfinite(total), lost, 0.0)  # inf - inf has made `lost` NaN
        return value if value.ndim else float(value)


class Mean(NamedTuple):
    """Weighted mean as two sums."""

    weighted: Sum  # sum of value * weight
    weight: Sum

    @classmethod
    def zero(cls) -> "Mean":
        """Return an empty mean."""
        return cls(Sum.zero(), Sum.zero())

    def add(self, weighted: jax.Array, weight: jax.Array) -> "Mean":
        """Return the mean with `sum(value * weight)` and `sum(weight)` of a batch added. Pure."""
        return Mean(self.weighted.add(weighted), self.weight.add(weight))

    def value(self) -> float:
        """Return the mean, on the host; NaN if the total weight is zero."""
        weight = self.weight.value()
        return self.weighted.value() / weight if weight else float("nan")
