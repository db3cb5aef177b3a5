"""Define metrics: three functions over a state on the device, or a collection on the host."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MASK = "mask"


class BaseMetric:
    """A metric as sums: `init` makes a state, `update` adds a batch to it, `compute` turns it into numbers.

    `init` and `update` are pure; `update` is compiled into the evaluation step, so that the state stays on the device
    and comes to the host once, at the end. It must honour `batch["mask"]` (see `real_rows`).

    Args:
      prefix: stands before the names of the results, `prefix/name`; None is the class's `default_prefix`.
    """

    default_prefix: str | None = None

    def __init__(self, prefix: str | None = None) -> None:
        self.prefix = self.default_prefix if prefix is None else prefix
        self.dataset_meta: Mapping[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the results without prefix, if they are known before there are any; else empty."""
        return ()

    def init(self) -> Any:
        """The state before any batch: a pytree of zeros."""
        raise NotImplementedError

    def update(self, state: Any, predictions: Any, batch: Any) -> Any:
        """The state with a batch added.

        Args:
          state: what `init` or `update` returned.
          predictions: what the model's `predict` returned, with leading axis B.
          batch: the batch, with leading axis B.
        """
        raise NotImplementedError

    def compute(self, state: Any) -> dict[str, Any]:
        """The results by name, from a state whose leaves are numpy arrays."""
        raise NotImplementedError

    def prefixed(self, name: str) -> str:
        """The name of a result as the log and the checkpoint hook know it."""
        return f"{self.prefix}/{name}" if self.prefix else name


class HostMetric(BaseMetric):
    """A metric that is no sum (a ranking, a matching, a file to write): batches are collected on the host.

    Each batch then costs a transfer, so a metric that can be a sum should be one. Subclasses append to
    `self.results` in `process` and read all of them in `compute_metrics`, as in MMEngine.

    Args:
      prefix: stands before the names of the results.
    """

    def __init__(self, prefix: str | None = None) -> None:
        super().__init__(prefix)
        self.results: list[Any] = []

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Appends to `self.results` what a batch adds.

        Args:
          data_batch: the batch: numpy arrays whose leading axis is the real rows, without `mask`.
          data_samples: the predictions for these rows: numpy arrays.
        """
        raise NotImplementedError

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """The results by name, from all that was appended, on all processes."""
        raise NotImplementedError

    def init(self) -> Any:
        """Nothing is kept on the device."""
        return ()

    def update(self, state: Any, predictions: Any, batch: Any) -> Any:
        """Nothing is kept on the device."""
        return state

    def collect(self, gather: Callable[[list[Any]], list[Any]] | None) -> dict[str, Any]:
        """`compute_metrics` of what was processed since the last time, which is then forgotten.

        Args:
          gather: this process's list -> the lists of all processes in one; None for a single process.
        """
        results, self.results = self.results, []
        return self.compute_metrics(results if gather is None else gather(results))


def real_rows(batch: Any) -> jax.Array:
    """Which rows of a batch are no padding: bool[B], its entry `mask` where it has one, else all.

    Raises:
      ValueError: a mask that is no vector, or a batch without an array to tell B from.
    """
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if mask is not None:
        if np.ndim(mask) != 1:
            raise ValueError(f"the mask of a batch is bool[B], found the shape {np.shape(mask)}")
        return jnp.asarray(mask, bool)
    sizes = [np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    if not sizes:
        raise ValueError("a batch holds arrays with a leading batch axis, found none")
    return jnp.ones(sizes[0], bool)


def drop_padding(tree: Any, mask: np.ndarray) -> Any:
    """The real rows of every numpy array that has as many rows as `mask`, bool[B]; other leaves stay as they are."""
    return jax.tree.map(lambda leaf: leaf[mask] if np.shape(leaf)[:1] == mask.shape else leaf, tree)


class Sum(NamedTuple):
    """A running sum and what its rounding has lost so far (Neumaier's variant of Kahan summation).

    A plain float32 sum drifts with the number of additions, and so the result would depend on the batch size; this
    one is good to float32's last digits however the addends are cut into batches. Integers are exact up to 2**47.
    """

    total: jax.Array  # float32[]
    lost: jax.Array  # float32[]

    @classmethod
    def zero(cls) -> "Sum":
        """The empty sum."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def add(self, value: jax.Array) -> "Sum":
        """The sum with `value` (a scalar of any real dtype) added; pure."""
        value = jnp.asarray(value).astype(jnp.float32)
        total = self.total + value
        sum_is_larger = jnp.abs(self.total) >= jnp.abs(value)
        larger = jnp.where(sum_is_larger, self.total, value)
        smaller = jnp.where(sum_is_larger, value, self.total)
        return Sum(total, self.lost + ((larger - total) + smaller))

    def value(self) -> float:
        """The number, in double precision, on the host."""
        total, lost = float(self.total), float(self.lost)
        return total + lost if np.isfinite(total) else total


class Mean(NamedTuple):
    """A weighted mean: two sums."""

    weighted: Sum  # sum of value * weight
    weight: Sum

    @classmethod
    def zero(cls) -> "Mean":
        """The mean of nothing yet."""
        return cls(Sum.zero(), Sum.zero())

    def add(self, weighted: jax.Array, weight: jax.Array) -> "Mean":
        """The mean with a batch's `sum(value * weight)` and `sum(weight)` added; pure."""
        return Mean(self.weighted.add(weighted), self.weight.add(weight))

    def value(self) -> float:
        """The mean, on the host; NaN without any weight."""
        weight = self.weight.value()
        return self.weighted.value() / weight if weight else float("nan")
