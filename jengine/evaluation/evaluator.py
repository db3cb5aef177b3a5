"""The evaluator: all metrics of an evaluation as one state on the device, fetched once."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.errors import ConfigError, config_path
from jengine.evaluation.metric import MASK, BaseMetric, HostMetric, drop_padding, real_rows
from jengine.registry import EVALUATOR, METRICS


class EvaluatorState(NamedTuple):
    """What an evaluation has summed up so far."""

    examples: jax.Array  # int32[], real ones seen
    metrics: tuple[Any, ...]  # the state of each metric


@EVALUATOR.register_module()
class Evaluator:
    """Runs several metrics as one.

    `init` begins an evaluation, the pure `update` belongs into the compiled step, `evaluate` fetches the sums, once.

    Args:
      metrics: a metric, its config, or several of either.

    Raises:
      ValueError: no metric, or two that give results of the same name. TypeError: something that is no metric.
    """

    def __init__(self, metrics: Any) -> None:
        self.metrics = _build_metrics(metrics)
        if not self.metrics:
            raise ConfigError("an evaluator needs at least one metric")
        _refuse_duplicates([metric.prefixed(name) for metric in self.metrics for name in metric.names])

    @property
    def host_metrics(self) -> list[HostMetric]:
        """The metrics that want every batch on the host; without any, `process_host` need not be called."""
        return [metric for metric in self.metrics if isinstance(metric, HostMetric)]

    @property
    def dataset_meta(self) -> Mapping[str, Any]:
        """Facts about the dataset (class names and so on) that the metrics see as their `dataset_meta`."""
        return self.metrics[0].dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, meta: Mapping[str, Any] | None) -> None:
        """Hands it to every metric."""
        for metric in self.metrics:
            metric.dataset_meta = dict(meta or {})

    def init(self) -> EvaluatorState:
        """The state before any batch; host metrics forget what an evaluation that was broken off left them."""
        for metric in self.host_metrics:
            metric.results = []
        return EvaluatorState(jnp.zeros((), jnp.int32), tuple(metric.init() for metric in self.metrics))

    def update(self, state: EvaluatorState, predictions: Any, batch: Any) -> EvaluatorState:
        """The state with a batch added; pure.

        Args:
          state: what `init` or `update` returned.
          predictions: pytree of arrays with leading axis B.
          batch: pytree of arrays with leading axis B; rows where its `mask` is False are padding and do not count.
        """
        return EvaluatorState(
            state.examples + real_rows(batch).sum(dtype=jnp.int32),
            tuple(
                metric.update(part, predictions, batch)
                for metric, part in zip(self.metrics, state.metrics, strict=True)
            ),
        )

    def process_host(self, predictions: Any, batch: Any) -> None:
        """Hands a batch to the host metrics, in one transfer, without its padding.

        Args:
          predictions: as for `update`; with several processes, this process's rows.
          batch: likewise.
        """
        if not self.host_metrics:
            return
        predictions, batch = jax.device_get((predictions, batch))
        if isinstance(batch, Mapping) and MASK in batch:
            mask = np.asarray(batch[MASK], bool)
            batch = drop_padding({key: value for key, value in batch.items() if key != MASK}, mask)
            predictions = drop_padding(predictions, mask)
        for metric in self.host_metrics:
            metric.process(batch, predictions)

    def evaluate(self, state: EvaluatorState, gather: Callable[[list[Any]], list[Any]] | None = None) -> dict[str, Any]:
        """The results of all metrics, by prefixed name.

        Args:
          state: the state after the last batch. It comes to the host in a single transfer.
          gather: joins the lists of all processes into one, for host metrics; None for a single process.

        Returns:
          Numbers as Python floats; other values as the metric gave them.

        Raises:
          ValueError: no example was seen, or two results have the same name.
        """
        examples, parts = jax.device_get(state)
        if examples == 0:
            raise ValueError("the evaluation saw no example: its dataloader yields no batch, or only padding")
        names: list[str] = []
        results: dict[str, Any] = {}
        for metric, part in zip(self.metrics, parts, strict=True):
            found = metric.collect(gather) if isinstance(metric, HostMetric) else metric.compute(part)
            names += [metric.prefixed(name) for name in found]
            results.update({metric.prefixed(name): _number(value) for name, value in found.items()})
        _refuse_duplicates(names)
        return results


def build_evaluator(cfg: Any) -> Evaluator:
    """Builds the evaluator of a config.

    Args:
      cfg: an evaluator; or `dict(metrics=...)`, perhaps with the `type` of an evaluator; or a metric or several,
        as configs or built.

    Raises:
      KeyError: an unknown type. TypeError, ValueError: as `Evaluator`.
    """
    if isinstance(cfg, Evaluator):
        return cfg
    if hasattr(cfg, "items") and ("metrics" in cfg or str(cfg.get("type")) in EVALUATOR):
        arguments = {"type": "Evaluator", **dict(cfg.items())}
        if "metrics" in arguments:
            with config_path("metrics"):
                arguments["metrics"] = _build_metrics(arguments["metrics"])
        return EVALUATOR.build(arguments)
    return Evaluator(cfg)


def _build_metrics(metrics: Any) -> list[BaseMetric]:
    """One metric or several; in a list, an error names the place in it."""
    if not isinstance(metrics, Sequence) or isinstance(metrics, str):
        return [_build_metric(metrics)]
    built = []
    for index, metric in enumerate(metrics):
        with config_path(index):
            built.append(_build_metric(metric))
    return built


def _build_metric(metric: Any) -> BaseMetric:
    built = METRICS.build(metric) if hasattr(metric, "items") else metric
    if not isinstance(built, BaseMetric):
        raise TypeError(f"a metric is a BaseMetric or a dict with its type, found {type(built).__name__}: {built!r}")
    return built


def _refuse_duplicates(names: Sequence[str]) -> None:
    twice = sorted(name for name, times in collections.Counter(names).items() if times > 1)
    if twice:
        raise ConfigError(f"several metrics give {', '.join(map(repr, twice))}: tell them apart with prefix=")


def _number(value: Any) -> Any:
    """A Python float for whatever is one number, `value` itself otherwise."""
    if isinstance(value, bool | str) or np.ndim(value) != 0:
        return value
    try:
        return float(value)
    except TypeError:
        return value
