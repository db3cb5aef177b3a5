"""Metrics from other libraries: `flax.nnx.metrics`, clu and metrax."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError, config_path
from jengine.config.modules import import_attribute
from jengine.config.registry import METRICS
from jengine.data.host_entries import Batch
from jengine.data.masking import MASK, get_mask
from jengine.evaluation.metric import BaseMetric, HostMetric, Predictions, example_mask
from jengine.model.selection import Selector, describe_tree, select

Arguments = dict[str, Any]  # keyword arguments for the other library's metric
Inputs = Mapping[str, Selector] | Callable[[Any, Any], Mapping[str, Any]]


class Kind(NamedTuple):
    """What libraries call their metrics' parts: a summary of examples, and its addition to a
    state.
    """

    signature: inspect.Signature  # of the function with the arguments
    needs_host: bool  # cannot be traced
    empty: Callable[[], Any]  # -> the state before the first batch; None if the metric cannot say
    summarize: Callable[[Arguments], Any]  # of a few examples -> what `add` takes
    add: Callable[[Any, Any], Any]  # (state, summary) -> state; the first state is None
    compute: Callable[[Any], Any]  # state -> the value, or several in a dict or a dataclass


def _merged_kind(cls: Any) -> Kind:
    """Return how to use a class with `from_model_output`, `merge` and `compute`, as in clu and
    metrax.
    """
    is_collection = hasattr(cls, "single_from_model_output")
    create = cls.single_from_model_output if is_collection else cls.from_model_output
    # Collecting metrics hold arrays that grow; without clu in memory there can be none
    collecting = getattr(sys.modules.get("clu.metrics"), "CollectingMetric", ())
    members = vars(cls).get("__annotations__", {}).values() if is_collection else (cls,)

    def empty() -> Any:
        try:
            return cls.empty()
        except (NotImplementedError, AttributeError):  # not every class has it
            return None

    return Kind(
        inspect.signature(create),
        needs_host=any(
            isinstance(member, type) and issubclass(member, collecting) for member in members
        ),
        empty=empty,
        summarize=lambda arguments: create(**arguments),
        # The first summary replaces `empty()`, which may not know all settings
        add=lambda state, summary: summary if state is None else state.merge(summary),
        compute=lambda state: state.compute(),
    )


def _nnx_kind(metric: Any) -> Kind:
    """Return how to use an object with `reset`, `update` and `compute`, as in `flax.nnx.metrics`.

    It is copied.
    """
    from flax import nnx

    # The same object may be in several evaluators, or belong to the user.
    metric = nnx.clone(metric)
    metric.reset()  # it may have been in use
    graphdef, empty = nnx.split(metric)

    def add(state: Any, arguments: Arguments) -> Any:
        # `update` changes variables in place: without a copy a trace would leave its tracers in the
        # empty state.
        updated: Any = nnx.merge(graphdef, empty if state is None else state, copy=True)
        updated.update(**arguments)
        return nnx.split(updated)[1]

    def compute(state: Any) -> Any:
        merged: Any = nnx.merge(graphdef, state, copy=True)
        return merged.compute()

    # These metrics cannot be merged: a summary is the arguments
    signature = inspect.signature(metric.update)
    return Kind(signature, False, lambda: empty, lambda arguments: arguments, add, compute)


class AdapterState(NamedTuple):
    """Another library's metric state."""

    has_examples: jax.Array  # bool[]
    metric: Any  # the other library's state; None before the first trace if its shapes are unknown


@METRICS.register_module()
class MetricAdapter(HostMetric):
    """Metric from `flax.nnx.metrics`, clu or metrax, accumulated on the device.

    An evaluator wraps such metrics itself; this class is for those that need settings. Padding does
    not count, whether or not the metric supports masks: a batch without padding is one call, and a
    padded batch is evaluated example by example. The result is called like the class (`accuracy`),
    or as in the collection.

    >>> from flax import nnx
    >>> metric = MetricAdapter(
    ...     nnx.metrics.Accuracy(), inputs=dict(logits="predictions", labels="label")
    ... )
    >>> batch = {"label": jnp.array([1, 1, 0]), "mask": jnp.array([True, True, False])}
    >>> state = metric.update(metric.init(), jnp.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), batch)
    >>> float(metric.compute(state)["accuracy"])
    0.5

    Args:
      metric: an `nnx.Metric` or its class; a clu or metrax metric, a collection, or one of their
        classes; or the import path or config of one of these.
      inputs: the entry for each argument, a name or dotted path: of the predictions, else of the
        batch; `predictions` and `batch` are the whole. Or a function `(predictions, batch) ->
        arguments`. By default, each argument gets the entry of its name; predictions that are a
        single array are `logits` and `predictions`, and the batch entry `label` is `labels` too.
      arguments: further arguments for each call, such as `dict(from_logits=True)`.
      name: result name, unless the metric returns several by name.
      prefix: prefix for result names, none by default.
      on_host: collect the arguments on the host, for metrics that cannot be traced, such as text
        metrics. This transfers them from the device in each batch.
    """

    def __init__(
        self,
        metric: Any,
        inputs: Inputs | None = None,
        arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        prefix: str | None = None,
        on_host: bool = False,
    ) -> None:
        super().__init__(prefix)
        with config_path("metric"):
            if isinstance(metric, str):
                metric = _get_class(metric)
            elif is_mapping(metric):
                metric = METRICS.build({**metric, "type": _get_class(metric.get("type"))})
        kind = find_kind(metric)
        if kind is None:
            raise TypeError(
                "`MetricAdapter.metric` must be a metric from flax.nnx.metrics, clu or metrax, "
                f"got {metric!r}"
            )
        self._kind = kind
        self._inputs = inputs
        self._arguments = dict(arguments or {})
        cls = metric if isinstance(metric, type) else type(metric)
        self.name = (
            re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower() if name is None else name
        )
        self.on_host = on_host or kind.needs_host
        self._shapes: Any = None  # of the state, if `empty()` has other ones
        # for each array among the arguments, where the results are by example
        self._is_by_example: list[bool] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The result names; () if they are not known before the evaluation."""
        if self.on_host or self.init().metric is None:
            return ()
        try:
            return tuple(
                jax.eval_shape(lambda: _by_name(self._kind.compute(self.init().metric), self.name))
            )
        except Exception:  # of any type: the metric may compute in NumPy, or reject the empty state
            return ()

    def init(self) -> Any:
        """Return the empty state."""
        if self.on_host:
            return super().init()
        metric = self._kind.empty() if self._shapes is None else jax.tree.map(_zeros, self._shapes)
        return AdapterState(
            jnp.zeros((), bool), jax.tree.map(lambda leaf: _strong(leaf, _struct(leaf)), metric)
        )

    def update(self, state: Any, predictions: Predictions, batch: Batch) -> Any:
        """Return the state with a batch added.

        If the batch shows that the state has other shapes than `init()` said, later calls to `init`
        know them.
        """
        if self.on_host:
            return state
        arguments = self._select(predictions, batch)
        try:
            return self._update(
                state, arguments, example_mask(batch), has_mask=get_mask(batch) is not None
            )
        except Exception as error:
            self._explain(error, arguments)
            raise

    def compute(self, state: Any) -> dict[str, Any]:
        """Return the results by name."""
        return self._results(jax.tree.map(jnp.asarray, state.metric))

    def process(self, data_batch: Batch, data_samples: Predictions) -> None:
        """Keep the arguments of a batch without padding, for metrics on the host."""
        self.results.append(self._select(data_samples, data_batch))

    def process_placed(
        self, data_batch: Batch, data_samples: Predictions, positions: Sequence[int]
    ) -> None:
        """Keep the arguments of each example, see `HostMetric`, and which arrays
        `compute_metrics` may stack.
        """
        leaves = jax.tree.leaves(self._select(data_samples, data_batch))
        self._is_by_example = [np.shape(leaf)[:1] == (len(positions),) for leaf in leaves]
        super().process_placed(data_batch, data_samples, positions)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return the results by name, for metrics on the host."""
        state = None
        if self._is_by_example:  # a call for each example would take long
            results = [
                self._stack(results[i : i + _STACKED]) for i in range(0, len(results), _STACKED)
            ]
        for entry in results:
            arguments = jax.tree.map(_to_plain, entry)
            try:
                arrays = jax.tree.map(
                    lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arguments
                )
                state = self._kind.add(state, self._kind.summarize(arrays))
            except Exception as error:
                self._explain(error, arguments)
                raise
        return self._results(state)

    def _stack(self, examples: Sequence[Arguments]) -> Arguments:
        """Return the arguments of several examples in a row as those of a batch."""
        leaves = [jax.tree.leaves(arguments) for arguments in examples]
        columns = zip(self._is_by_example, zip(*leaves, strict=True), strict=True)
        stacked = [
            np.concatenate(column) if is_by_example else column[0]
            for is_by_example, column in columns
        ]
        arguments: Arguments = jax.tree.unflatten(jax.tree.structure(examples[0]), stacked)
        return arguments

    def _update(
        self, state: AdapterState, arguments: Arguments, mask: jax.Array, has_mask: bool
    ) -> AdapterState:
        kind = self._kind
        new_state = jax.eval_shape(lambda: kind.add(state.metric, kind.summarize(arguments)))
        shapes = jax.tree.map(_struct, new_state)
        if jax.tree.flatten(shapes) != jax.tree.flatten(jax.tree.map(_struct, state.metric)):
            # Only before the first batch, so the state has no examples: `empty()` may hold scalars
            # for vectors
            self._shapes = shapes
            state = AdapterState(jnp.zeros((), bool), jax.tree.map(_zeros, shapes))

        def add(state: AdapterState, summary: Any, counts: ArrayLike = True) -> AdapterState:
            # Both are computed and one selected: whether there were examples is only known on the
            # device.
            first = kind.add(None, summary)
            later = kind.add(state.metric, summary)
            new = jax.tree.map(lambda a, b: jnp.where(state.has_examples, a, b), later, first)
            new = jax.tree.map(
                lambda old, a, s: _strong(jnp.where(counts, a, old), s), state.metric, new, shapes
            )
            return AdapterState(state.has_examples | counts, new)

        if not has_mask:
            return add(state, kind.summarize(arguments))
        leaves, structure = jax.tree.flatten(arguments)
        is_row = [np.shape(leaf)[:1] == mask.shape for leaf in leaves]

        def summarize(rows: list[jax.Array]) -> Any:
            """Return the summary of one example; what has no batch axis is the same for all."""
            row = iter(rows)
            filled = [
                next(row)[None] if has_axis else leaf
                for leaf, has_axis in zip(leaves, is_row, strict=True)
            ]
            return kind.summarize(jax.tree.unflatten(structure, filled))

        def add_rows(state: AdapterState) -> AdapterState:
            # The summaries stay sharded along the batch; only these, which are small, are gathered
            # for the scan.
            summaries = jax.vmap(summarize)(
                [leaf for leaf, has_axis in zip(leaves, is_row, strict=True) if has_axis]
            )
            return jax.lax.scan(
                lambda state, row: (add(state, *row), None), state, (summaries, mask)
            )[0]

        if not any(is_row):  # one value for the batch, such as the mean loss
            return add(state, kind.summarize(arguments), mask.any())
        # Only the last batch is padded, so that the slow way, example by example, is taken once.
        return jax.lax.cond(
            mask.all(), lambda state: add(state, kind.summarize(arguments)), add_rows, state
        )

    def _select(self, predictions: Predictions, batch: Batch) -> Arguments:
        if callable(self._inputs):
            return {**self._inputs(predictions, batch), **self._arguments}
        # Predictions come after the batch, so they win where both have an entry of one name.
        entries: dict[str, Any] = {"batch": batch, "predictions": predictions}
        for tree in (batch, predictions):
            entries |= (
                {key: entry for key, entry in tree.items() if key != MASK}
                if isinstance(tree, Mapping)
                else {}
            )
        if self._inputs is not None:
            selected = {
                name: select(
                    entries,
                    selector,
                    f"{type(self).__name__}.inputs.{name}",
                    "batch with predictions",
                )
                for name, selector in self._inputs.items()
            }
            return {**selected, **self._arguments}
        if hasattr(predictions, "shape"):
            entries.setdefault("logits", predictions)
        if "label" in entries:
            entries.setdefault("labels", entries["label"])
        # By default only arrays: a metric with `**kwargs` gets all, and cannot use whole trees.
        entries = {**{k: v for k, v in entries.items() if hasattr(v, "shape")}, **self._arguments}
        parameters = self._kind.signature.parameters.values()
        missing = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind not in _VARIABLE and p.name not in entries
        ]
        if missing:
            raise ConfigError(
                f"`MetricAdapter.inputs` must give the arguments {missing} of {self.name!r}; "
                f"{describe_tree(batch, 'batch')}, and {describe_tree(predictions, 'predictions')}"
            )
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return entries
        return {p.name: entries[p.name] for p in parameters if p.name in entries}

    def _results(self, state: Any) -> dict[str, Any]:
        return {
            name: np.asarray(value)
            for name, value in _by_name(self._kind.compute(state), self.name).items()
        }

    def _explain(self, error: Exception, arguments: Arguments) -> None:
        hint = "" if self.on_host else "; a metric that JAX cannot trace needs on_host=True"
        error.add_note(
            f"in the metric {self.name!r}, called with the arguments {sorted(arguments)}: "
            f"`MetricAdapter.inputs` selects them{hint}"
        )


_LIBRARIES = ("clu", "flax", "metrax")
_STACKED = 128  # examples
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def find_kind(metric: object) -> Kind | None:
    """Return how to use a metric from another library, an object or a class.

    None for anything else.
    """
    # jengine's own metrics have `update` and `compute` too, with other arguments.
    if isinstance(metric, BaseMetric) or (
        isinstance(metric, type) and issubclass(metric, BaseMetric)
    ):
        return None
    cls = metric if isinstance(metric, type) else type(metric)
    if all(hasattr(cls, name) for name in ("merge", "compute")) and (
        hasattr(cls, "from_model_output") or hasattr(cls, "single_from_model_output")
    ):
        return _merged_kind(cls)
    if all(hasattr(cls, name) for name in ("reset", "update", "compute")):
        # `nnx.metrics.Accuracy` is a class without required arguments; its signature is that of an
        # object's method.
        metric = metric() if isinstance(metric, type) else metric
        if hasattr(metric, "clu_metric"):  # metrax.nnx wraps a metric that NNX cannot split
            return _merged_kind(type(metric.clu_metric))
        return _nnx_kind(metric)
    return None


def adapt_metric(metric: Any) -> Any:
    """Wrap a metric of another library in a `MetricAdapter`; return anything else as it is.

    Args:
      metric: an object, a class, or a config; in the config of a class that makes its objects from
        the first batch, as clu's do, the adapter takes the place of the class.

    >>> adapt_metric({"type": "Accuracy", "topk": 5})["topk"]
    5
    """
    # A class derived from dict has `items` too, but is no config.
    if hasattr(metric, "items") and not isinstance(metric, type):
        kind = _get_class(metric.get("type"))
        if isinstance(kind, type) and hasattr(kind, "merge"):
            return {**metric, "type": MetricAdapter, "metric": kind}
        return {**metric, "type": kind} if "type" in metric else metric
    return metric if find_kind(metric) is None else MetricAdapter(metric)


def _get_class(kind: object) -> Any:
    """Return the class for a name in `METRICS` or an import path, and anything else unchanged.

    A path into another library is imported even if its last part is a name in `METRICS`, as is
    `Accuracy`.
    """
    if not isinstance(kind, str):
        return kind
    if kind.partition(".")[0] not in _LIBRARIES:
        return METRICS.get_type(kind)
    with config_path("type"):
        return import_attribute(kind)


def _by_name(value: object, name: str) -> dict[str, Any]:
    """Return results by name: the entries of a dict, the fields of a dataclass as `name/field`,
    or one value.
    """
    if isinstance(value, Mapping):
        return {
            key: leaf
            for outer, entry in value.items()
            for key, leaf in _by_name(entry, outer).items()
        }
    if dataclasses.is_dataclass(value):
        return {
            f"{name}/{field.name}": getattr(value, field.name)
            for field in dataclasses.fields(value)
        }
    return {name: value}


def _struct(leaf: jax.Array | jax.ShapeDtypeStruct | float) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype alone: whether a dtype is weak must not matter."""
    array = jnp.asarray(leaf) if isinstance(leaf, int | float) else leaf
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(struct.shape, struct.dtype)


def _strong(leaf: ArrayLike, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a copy whose dtype no later sum changes: a Python number would make each step
    compile again.
    """
    return jnp.array(leaf, struct.dtype)  # a copy, as the state is donated


def _to_plain(leaf: np.ndarray | str | float) -> Any:
    """Return strings as a list, which is what text metrics take, and other arrays as NumPy
    arrays.
    """
    if not hasattr(leaf, "dtype"):
        return leaf
    array = np.asarray(leaf)
    return array.tolist() if array.dtype.kind in "OSU" else array
