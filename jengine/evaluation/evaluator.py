"""Combine the metrics of an evaluation in one state on the device, which is fetched once."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.data.masking import get_mask, without_mask
from jengine.errors import ConfigError, config_path
from jengine.evaluation.metric import BaseMetric, Gather, HostMetric, drop_padding, example_mask
from jengine.registry import EVALUATOR, METRICS, as_config


class EvaluatorState(NamedTuple):
    """Hold the sums of an evaluation."""

    examples: jax.Array  # int32[], number of examples so far, without padding
    metrics: tuple[Any, ...]  # the state of each metric


@EVALUATOR.register_module()
class Evaluator:
    """Evaluate several metrics together.

    `init` starts an evaluation, the pure `update` is called in the compiled step, and `evaluate` fetches the sums once.

    Args:
      metrics: a metric or its config, or a list of these.

    Raises:
      ValueError: if there is no metric, or two results have the same name.
      TypeError: if an entry is not a metric.
    """

    def __init__(self, metrics: Any) -> None:
        self.metrics = _build_metrics(metrics)
        if not self.metrics:
            raise ConfigError("an evaluator must have at least one metric, got none")
        _check_unique([metric.add_prefix(name) for metric in self.metrics for name in metric.names])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all results, with prefix; () if those of a metric are not known before the evaluation."""
        if not all(metric.names for metric in self.metrics):
            return ()
        return tuple(metric.add_prefix(name) for metric in self.metrics for name in metric.names)

    @property
    def host_metrics(self) -> list[HostMetric]:
        """The metrics that require every batch on the host; without any, `process_host` does nothing."""
        return [metric for metric in self.metrics if isinstance(metric, HostMetric)]

    @property
    def dataset_meta(self) -> Mapping[str, Any]:
        """The metadata of the dataset (class names and so on), which each metric has as its `dataset_meta`."""
        return self.metrics[0].dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, meta: Mapping[str, Any] | None) -> None:
        """Set the metadata of every metric."""
        for metric in self.metrics:
            metric.dataset_meta = dict(meta or {})

    def init(self) -> EvaluatorState:
        """Return the initial state, and clear the results that an interrupted evaluation left in host metrics."""
        for metric in self.host_metrics:
            metric.results = []
        return EvaluatorState(jnp.zeros((), jnp.int32), tuple(metric.init() for metric in self.metrics))

    def update(self, state: EvaluatorState, predictions: Any, batch: Any) -> EvaluatorState:
        """Return the state with a batch added. Pure.

        Args:
          state: the result of `init` or of the previous `update`.
          predictions: pytree of arrays with leading axis B.
          batch: pytree of arrays with leading axis B; examples where its mask is False are padding and do not count.
        """
        return EvaluatorState(
            state.examples + example_mask(batch).sum(dtype=jnp.int32),
            tuple(
                metric.update(metric_state, predictions, batch)
                for metric, metric_state in zip(self.metrics, state.metrics, strict=True)
            ),
        )

    def process_host(self, predictions: Any, batch: Any) -> None:
        """Transfer a batch to the host once and pass it to the host metrics, without its padding.

        Args:
          predictions: as for `update`; with several processes, only the examples of this process.
          batch: as for `update`; with several processes, only the examples of this process.
        """
        if not self.host_metrics:
            return
        predictions, batch = jax.device_get((predictions, batch))
        if (mask := get_mask(batch)) is not None:
            batch, predictions = drop_padding((without_mask(batch), predictions), np.asarray(mask, bool))
        for metric in self.host_metrics:
            metric.process(batch, predictions)

    def evaluate(self, state: EvaluatorState, gather: Gather | None = None) -> dict[str, Any]:
        """Return the results of all metrics by name, with prefix.

        Args:
          state: the state after the last batch, fetched in a single transfer.
          gather: concatenates the lists of all processes, for host metrics; None for a single process.

        Returns:
          Numbers as Python floats; other values as returned by the metric.

        Raises:
          ValueError: if there are no examples, or two results have the same name.
        """
        examples, metric_states = jax.device_get(state)
        if examples == 0:
            raise ValueError(
                "an evaluation must have at least one example, got none; does the dataloader yield any batches?"
            )
        names: list[str] = []
        results: dict[str, Any] = {}
        for metric, metric_state in zip(self.metrics, metric_states, strict=True):
            values = metric.collect(gather) if isinstance(metric, HostMetric) else metric.compute(metric_state)
            names += [metric.add_prefix(name) for name in values]
            results.update({metric.add_prefix(name): _to_float(value) for name, value in values.items()})
        _check_unique(names)
        return results


def build_evaluator(cfg: Any) -> Evaluator:
    """Build an evaluator from a config.

    Args:
      cfg: an evaluator, or `dict(metrics=...)` with an optional `type`, or a metric or its config, or a list of these.

    Raises:
      KeyError: if a type is unknown.
      TypeError, ValueError: see `Evaluator`.
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
        return [_build_metric(metrics)]
    built = []
    for index, metric in enumerate(metrics):
        with config_path(index):
            built.append(_build_metric(metric))
    return built


def _build_metric(metric: Any) -> BaseMetric:
    metric = as_config(metric)
    built = METRICS.build(metric) if hasattr(metric, "items") else metric
    if not isinstance(built, BaseMetric):
        raise TypeError(f"a metric must be a BaseMetric or a dict with a 'type', got {type(built).__name__}: {built!r}")
    return built


def _check_unique(names: Sequence[str]) -> None:
    duplicates = sorted(name for name, count in collections.Counter(names).items() if count > 1)
    if duplicates:
        raise ConfigError(
            f"the results of metrics must have unique names, got {', '.join(map(repr, duplicates))} more than once; "
            "set `prefix`"
        )


def _to_float(value: Any) -> Any:
    """Return a number as a Python float, and any other value unchanged."""
    if isinstance(value, bool | str) or np.ndim(value) != 0:
        return value
    try:
        return float(value)
    except TypeError:
        return value
