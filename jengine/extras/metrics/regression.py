"""Regression metrics over all elements of the targets."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.config.registry import METRICS
from jengine.data.host_entries import Batch
from jengine.evaluation.metric import Mean, PairMetric, Predictions, Sum, element_mask
from jengine.model.autocast import at_least_float32
from jengine.model.selection import Selector, describe_array


class RegressionMetric(PairMetric):
    """Base class for the mean of an error over all elements; subclasses define `error`.

    Args:
      target: name, index or dotted path of the batch entry with the targets, float[B, ...].
      prediction: the prediction entry with the same shape; None if the predictions are an array.
      prefix: prefix for the result name, none by default.
    """

    def __init__(
        self,
        target: Selector = "target",
        prediction: Selector | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(target, prediction, prefix)

    def error(self, difference: jax.Array) -> jax.Array:
        """Return the error for each element."""
        raise NotImplementedError

    def init(self) -> Any:
        """Return an empty mean."""
        return Mean.zero()

    def update(self, state: Any, predictions: Predictions, batch: Batch) -> Any:
        """Return the mean with a batch added; ValueError for other shapes."""
        predictions, targets, mask = self._arrays(predictions, batch)
        return state.add(jnp.where(mask, self.error(predictions - targets), 0.0).sum(), mask.sum())

    def compute(self, state: Any) -> dict[str, float]:
        """Return the mean; NaN without examples."""
        return {self.names[0]: state.value()}

    def _arrays(
        self, predictions: Predictions, batch: Batch
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return predictions, targets, and which elements count, all with the shape of the
        targets.
        """
        predictions, targets = (jnp.asarray(array) for array in self.select(predictions, batch))
        if predictions.shape != targets.shape:  # [B, 1] and [B] would make [B, B]
            raise ValueError(
                f"{type(self).__name__}: predictions must have the shape of the targets "
                f"{describe_array(targets)}, got {describe_array(predictions)}"
            )
        return (
            at_least_float32(predictions),
            at_least_float32(targets),
            element_mask(batch, targets),
        )


@METRICS.register_module("MeanSquaredError")
class MeanSquaredErrorMetric(RegressionMetric):
    """Mean squared error over all elements, `mse`, or its root, `rmse`.

    >>> metric = MeanSquaredErrorMetric()
    >>> metric.compute(
    ...     metric.update(metric.init(), jnp.array([1.0, 3.0]), {"target": jnp.array([1.0, 1.0])})
    ... )
    {'mse': 2.0}

    Args:
      target, prediction, prefix: see `RegressionMetric`.
      root: return the square root.
    """

    def __init__(
        self,
        target: Selector = "target",
        prediction: Selector | None = None,
        root: bool = False,
        prefix: str | None = None,
    ) -> None:
        super().__init__(target, prediction, prefix)
        self.root = root

    @property
    def names(self) -> tuple[str, ...]:
        """The name `mse` or `rmse`."""
        return ("rmse",) if self.root else ("mse",)

    def error(self, difference: jax.Array) -> jax.Array:
        """Return the square."""
        return jnp.square(difference)

    def compute(self, state: Mean) -> dict[str, float]:
        """Return the mean or its root."""
        return {self.names[0]: state.value() ** 0.5 if self.root else state.value()}


MeanSquaredError = MeanSquaredErrorMetric


@METRICS.register_module()
class MeanAbsoluteError(RegressionMetric):
    """Mean absolute error over all elements, `mae`. The arguments are those of `RegressionMetric`.

    >>> metric = MeanAbsoluteError()
    >>> metric.compute(
    ...     metric.update(metric.init(), jnp.array([1.0, 3.0]), {"target": jnp.array([1.0, 1.0])})
    ... )
    {'mae': 1.0}
    """

    names = ("mae",)

    def error(self, difference: jax.Array) -> jax.Array:
        """Return the absolute value."""
        return abs(difference)


class Deviations(NamedTuple):
    """Sums for R2. Targets are counted from a pivot: the squares of large targets would hide
    their variance.
    """

    pivot: jax.Array  # float32[], the first target
    residual: Sum  # of (prediction - target)**2
    targets: Sum  # of target - pivot
    squares: Sum  # of (target - pivot)**2
    weight: Sum  # number of elements


@METRICS.register_module()
class R2Score(RegressionMetric):
    """Coefficient of determination over all elements, `r2`: 1 minus the residuals' share of the
    targets' variance.

    As in scikit-learn, it is 1 for exact predictions of a constant target, and 0 for others.
    Arguments as for `RegressionMetric`.

    >>> metric = R2Score()
    >>> state = metric.update(
    ...     metric.init(), jnp.array([1.0, 2.0, 4.0]), {"target": jnp.array([1.0, 2.0, 3.0])}
    ... )
    >>> metric.compute(state)
    {'r2': 0.5}
    """

    names = ("r2",)

    def init(self) -> Deviations:
        """Return empty sums."""
        return Deviations(jnp.zeros((), float), *(Sum.zero() for _ in range(4)))

    def update(self, state: Deviations, predictions: Predictions, batch: Batch) -> Deviations:
        """Return the sums with a batch added."""
        predictions, targets, mask = self._arrays(predictions, batch)
        # `argmax` of a mask is the first True: the pivot must not be padding.
        first = jnp.ravel(targets)[jnp.argmax(jnp.ravel(mask))].astype(state.pivot.dtype)
        pivot = jnp.where((state.weight.total == 0) & mask.any(), first, state.pivot)
        deviation = jnp.where(mask, targets - pivot, 0.0)
        return Deviations(
            pivot,
            state.residual.add(jnp.where(mask, jnp.square(predictions - targets), 0.0).sum()),
            state.targets.add(deviation.sum()),
            state.squares.add(jnp.square(deviation).sum()),
            state.weight.add(mask.sum()),
        )

    def compute(self, state: Deviations) -> dict[str, float]:
        """Return R2; NaN for fewer than two elements."""
        residual = state.residual.value()
        count = state.weight.value()
        if count < 2:
            return {"r2": float("nan")}
        # n times the variance, which a shift by the pivot does not change.
        total = state.squares.value() - state.targets.value() ** 2 / count
        # `1 - residual * 0` keeps a NaN: a model whose predictions are not numbers has no score.
        return {"r2": 1 - residual / total if total > 0 else float(residual == 0) + residual * 0}
