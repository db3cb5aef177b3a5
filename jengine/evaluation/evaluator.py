"""Evaluator: several metrics in one state on the device, which is fetched once."""

import collections
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError, UnknownNameError, config_path
from jengine.config.plugins import load_each
from jengine.config.registry import EVALUATOR, METRICS, as_config
from jengine.data.collate import count_examples
from jengine.data.host_entries import Batch, select_arrays
from jengine.data.masking import get_mask, without_mask
from jengine.evaluation.metric import (
    BaseMetric,
    Gather,
    HostMetric,
    Predictions,
    drop_padding,
    example_mask,
)
from jengine.logging.console import current_logger


class EvaluatorState(NamedTuple):
    """Evaluation sums."""

    examples: jax.Array  # int32[], number of examples so far, without padding
    batches: jax.Array  # int32[], number of batches so far, for the keys of models that sample
    not_numbers: jax.Array  # int32[], number of examples so far whose predictions have a NaN
    metrics: tuple[Any, ...]  # the state of each metric


@EVALUATOR.register_module()
class Evaluator:
    """Evaluation with several metrics together.

    `init` starts an evaluation, the pure `update` is called in the compiled step, and `evaluate`
    fetches the sums once.

    Args:
      metrics: a metric, a metric config, or a list of these. Metrics from `flax.nnx.metrics`, clu
        and metrax, objects or classes, are wrapped by the extra with an adapter for them.

    Examples:
      >>> from jengine.evaluation.accuracy import Accuracy
      >>> evaluator = Evaluator(Accuracy())
      >>> batch = {"label": jnp.array([1, 0])}
      >>> state = evaluator.update(evaluator.init(), jnp.array([1, 1]), batch)
      >>> evaluator.evaluate(state)
      {'accuracy/top1': 0.5}
    """

    def __init__(self, metrics: Any) -> None:
        self.metrics = _build_metrics(metrics)
        if not self.metrics:
            raise ConfigError("an evaluator must have at least one metric, got none")
        _check_unique([metric.add_prefix(name) for metric in self.metrics for name in metric.names])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all results, with prefix.

        () if a metric does not know them before the evaluation.
        """
        names: list[str] = []
        for metric in self.metrics:
            if metric.has_results:
                if not metric.names:  # a list without the names of one metric would look complete
                    return ()
                names += map(metric.add_prefix, metric.names)
        return tuple(names)

    @property
    def host_metrics(self) -> list[HostMetric]:
        """The metrics that require every batch on the host.

        Without any, `process_host` does nothing.
        """
        return [
            metric for metric in self.metrics if isinstance(metric, HostMetric) and metric.on_host
        ]

    @property
    def dataset_meta(self) -> Mapping[str, Any]:
        """The dataset metadata (class names and so on), which every metric has as
        `dataset_meta`.
        """
        return self.metrics[0].dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, meta: Mapping[str, Any] | None) -> None:
        """Set the metadata for every metric."""
        for metric in self.metrics:
            metric.dataset_meta = dict(meta or {})

    def init(self) -> EvaluatorState:
        """Return the initial state, and clear what an interrupted evaluation left in host
        metrics.
        """
        for metric in self.host_metrics:
            metric.clear()
        # constants come from the host: a user's guard is about other transfers
        with jax.transfer_guard_host_to_device("allow"):
            return EvaluatorState(
                examples=jnp.zeros((), jnp.int32),  # not one array for all, as the state is donated
                batches=jnp.zeros((), jnp.int32),
                not_numbers=jnp.zeros((), jnp.int32),
                metrics=tuple(metric.init() for metric in self.metrics),
            )

    def update(
        self, state: EvaluatorState, predictions: Predictions, batch: Batch
    ) -> EvaluatorState:
        """Return the state with a batch added. Pure.

        Args:
          state: the result from `init` or the previous `update`.
          predictions: pytree with arrays, leading axis B.
          batch: pytree with arrays, leading axis B; examples where the mask is False are padding
            and do not count.
        """
        pairs = zip(self.metrics, state.metrics, strict=True)
        metrics = tuple(
            metric.update(metric_state, predictions, batch) for metric, metric_state in pairs
        )
        mask = example_mask(batch)
        not_numbers = state.not_numbers + (_has_nan(predictions, mask) & mask).sum(dtype=jnp.int32)
        return EvaluatorState(
            state.examples + mask.sum(dtype=jnp.int32), state.batches + 1, not_numbers, metrics
        )

    def process_host(
        self, predictions: Predictions, batch: Batch, positions: np.ndarray | None = None
    ) -> None:
        """Pass a batch without padding to the host metrics.

        Args:
          predictions, batch: with only this process's examples, and their padding.
          positions: the positions of the examples in the dataset, int[B], by which `gather` orders
            the entries of several processes; None keeps the order in which they are processed.
        """
        if not self.host_metrics:
            return
        predictions, batch = jax.device_get((predictions, batch))  # in one transfer
        if (mask := get_mask(batch)) is not None:
            mask = np.asarray(mask, bool)
            batch, predictions = drop_padding((without_mask(batch), predictions), mask)
            positions = None if positions is None else positions[mask]
        for metric in self.host_metrics:
            if positions is None:
                metric.process(batch, predictions)
            else:
                metric.process_placed(batch, predictions, positions.tolist())

    def gather(self, gather: Gather) -> None:
        """Give each host metric the entries of all processes.

        `evaluate` on one of them then returns the results.
        """
        for metric in self.host_metrics:
            metric.gather(gather)

    def evaluate(self, state: EvaluatorState, gather: Gather | None = None) -> dict[str, Any]:
        """Return the results of all metrics by name, with prefix.

        Warn if predictions are not numbers.

        Numbers are Python floats, other values are as the metric returned them.

        Args:
          state: the state after the last batch, fetched in a single transfer.
          gather: concatenates the lists of all processes, for host metrics; None for a single
            process.

        Raises:
          ValueError: there are no examples, or two results have the same name.
        """
        # the only wait for the device
        examples, _, not_numbers, metric_states = jax.device_get(state)
        if examples == 0:
            raise ValueError(
                "an evaluation must have at least one example, got none; does the dataloader "
                "yield any batches?"
            )
        if not_numbers:
            current_logger().warning(
                f"The predictions of {not_numbers} of {examples} examples have a NaN, which "
                "metrics of classes take for no class."
            )
        results: list[tuple[str, Any]] = []
        on_host = self.host_metrics
        # A host metric has an empty state, and its examples are gathered from all processes here.
        for metric, metric_state in zip(self.metrics, metric_states, strict=True):
            values = metric.collect(gather) if metric in on_host else metric.compute(metric_state)
            results += [(metric.add_prefix(key), _to_float(x)) for key, x in values.items()]
        _check_unique([name for name, _ in results])
        return dict(results)

    def offline_evaluate(
        self, data_samples: Any, data: Any = None, chunk_size: Count = 128
    ) -> dict[str, Any]:
        """Return the results for predictions from earlier, as a `DumpResults` writes them.

        Args:
          data_samples: the predictions: a list with an entry for each example, or arrays with a
            leading axis.
          data: the labels, in either form; None if the predictions contain them.
          chunk_size: examples at a time, which the results do not depend on.

        Raises:
          ValueError: labels and predictions differ in number, or there are none.

        Examples:
          >>> from jengine.evaluation.accuracy import Accuracy
          >>> Evaluator(Accuracy()).offline_evaluate(
          ...     np.array([1, 2, 3]), {"label": np.array([1, 2, 0])}, chunk_size=2
          ... )
          {'accuracy/top1': 0.6666666666666666}
        """
        data = data_samples if data is None else data
        sizes = [len(x) if isinstance(x, list) else count_examples(x) for x in (data_samples, data)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"there must be as many labels as predictions, got {sizes[1]} and {sizes[0]}"
            )
        # The last chunk may be shorter; compiling twice is simpler than padding here.
        state = self.init()
        update = jax.jit(self.update)
        for start in range(0, sizes[0], chunk_size):
            rows = slice(start, start + chunk_size)
            predictions = _take(data_samples, rows)
            batch = _take(data, rows)
            state = update(state, select_arrays(predictions), select_arrays(batch))
            self.process_host(predictions, batch)
        return self.evaluate(state)


def get_metric_value(indicator: str, metrics: Mapping[str, Any]) -> Any:
    """Return the result called `indicator`: the full name, or what follows the prefix.

    >>> get_metric_value("top1", {"accuracy/top1": 0.5, "loss": 2.0})
    0.5

    Raises:
      UnknownNameError: no name matches, or several do.
    """
    if indicator in metrics:
        return metrics[indicator]
    matches = [name for name in metrics if name.rsplit("/", 1)[-1] == indicator]
    if len(matches) == 1:
        return metrics[matches[0]]
    found = f"which matches {', '.join(matches)}" if matches else f"not in {', '.join(metrics)}"
    raise UnknownNameError(f"the name of a metric must match one, got {indicator!r}, {found}")


def build_evaluator(cfg: Any) -> Evaluator:
    """Build an evaluator from `dict(metrics=...)` with an optional `type`, or from the argument of
    `Evaluator`.

    Examples:
      >>> build_evaluator(dict(type="Accuracy", topk=(1, 5))).names
      ('accuracy/top1', 'accuracy/top5')
    """
    if isinstance(cfg, Evaluator):
        return cfg
    if isinstance(cfg, str) and cfg in EVALUATOR:
        cfg = as_config(cfg)
    if hasattr(cfg, "items") and ("metrics" in cfg or str(cfg.get("type")) in EVALUATOR):
        arguments = {"type": "Evaluator", **dict(cfg.items())}
        if "metrics" in arguments:
            with config_path("metrics"):
                arguments["metrics"] = _build_metrics(arguments["metrics"])
        return EVALUATOR.build(arguments)
    return Evaluator(cfg)


def _build_metrics(metrics: Any) -> list[BaseMetric]:
    """Build one metric or a list of metrics; errors contain the index in the list."""
    if not isinstance(metrics, Sequence) or isinstance(metrics, str):
        return [_build_metric(as_config(metrics))]
    built = []
    for index, entry in enumerate(metrics):
        with config_path(index):
            built.append(_build_metric(as_config(entry)))
    return built


def _build_metric(metric: Any) -> BaseMetric:
    """Build a metric from its config, and wrap those from other libraries."""
    # A class derived from dict has `items` too, but is no config.
    if hasattr(metric, "items") and not isinstance(metric, type):
        metric = METRICS.build(_adapt(metric))
    if not isinstance(metric, BaseMetric):
        metric = _adapt(metric)
    if not isinstance(metric, BaseMetric):
        raise TypeError(
            "a metric must be a BaseMetric, a metric of flax.nnx, clu or metrax, or a dict with a "
            f"'type', got {type(metric).__name__}: {metric!r}"
        )
    return metric


def _adapt(metric: Any) -> Any:
    for adapt in load_each("metric_adapters"):
        metric = adapt(metric)
    return metric


def _has_nan(predictions: Predictions, mask: jax.Array) -> jax.Array:
    """Return which examples have a NaN among their predictions, bool[B]; `mask` gives the shape."""
    has_nan = jnp.zeros(mask.shape, bool)
    for leaf in jax.tree.leaves(predictions):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact):
            # Without an axis of examples, as a temperature, the value belongs to all of them.
            axes = tuple(range(1, leaf.ndim)) if leaf.shape[:1] == mask.shape else None
            has_nan |= jnp.isnan(leaf).any(axis=axes)
    return has_nan


def _take(data: Any, rows: slice) -> Any:
    """Return some examples as a batch, from a list of examples or from arrays."""
    if isinstance(data, list):
        return jax.tree.map(lambda *arrays: np.stack(arrays), *data[rows])
    return jax.tree.map(lambda array: np.asarray(array)[rows], data)


def _check_unique(names: Sequence[str]) -> None:
    duplicates = sorted(name for name, count in collections.Counter(names).items() if count > 1)
    if duplicates:
        raise ConfigError(
            "the results of metrics must have unique names, got "
            f"{', '.join(map(repr, duplicates))} more than once; set `prefix`"
        )


def _to_float(value: Any) -> Any:
    """Return a number as a Python float, and any other value unchanged."""
    is_number = isinstance(value, numbers.Real | np.generic | np.ndarray | jax.Array)
    if not is_number or isinstance(value, bool | str) or np.ndim(value):
        return value
    return float(value)
