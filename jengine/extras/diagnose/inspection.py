"""Statistics of the values inside a training step, by dotted path."""

import fnmatch
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.data.batch_check import Batch
from jengine.data.host_entries import select_arrays
from jengine.data.masking import on_whole_batches
from jengine.extras.diagnose.histogram import BinnedArray, bin_elements
from jengine.extras.diagnose.traced_values import GRADIENT, Seen, base_path, collect, mark
from jengine.model.module_types import stacked_axes
from jengine.train.state import TrainState
from jengine.train.step import build_train_step
from jengine.train.traced_hooks import StepContext

PyTree = Any
Statistic = Literal["mean", "rms", "max", "zeros", "nonfinite"]
STATISTICS: tuple[Statistic, ...] = ("mean", "rms", "max", "zeros", "nonfinite")
_TREES = ("batch", "loss", "grads", "updates", "params")
_STEP_VALUES = tuple(f"{name}." for name in _TREES)


class RecordedValue(NamedTuple):
    """What is recorded of one value in a step, on the device."""

    # f32[6]: sums of the finite elements and their squares over the size, their maximum, shares of
    # zeros, of elements that are not finite, and of NaN
    moments: jax.Array
    bins: BinnedArray | None = None
    array: jax.Array | None = None
    bad_examples: jax.Array | None = None  # bool[B], of a value with the batch's leading axis


class Origin(NamedTuple):
    """Where in the step a value is from, and its form."""

    shape: tuple[int, ...]  # of one layer, and of one replica
    dtype: str
    seen: Seen


def compile_inspection(
    runner: Any,
    patterns: Sequence[str] | None,
    *,
    update: bool = True,
    arrays: bool = False,
    bins: int | None = None,
) -> tuple[Callable[..., tuple[TrainState, dict[str, RecordedValue]]], dict[str, Origin]]:
    """Compile `inspect(state, batch, hyperparams) -> (state, values by path)` for a run.

    It computes one training step, hooks in the step included, and returns the state as it was in
    the place of the new one; the arguments are those of the step, and the state is donated.

    Args:
      runner: the run, whose training is prepared.
      patterns: see `matches`; None for all values.
      update: whether the step updates or only accumulates gradients.
      arrays: whether to return the arrays too.
      bins: the number of bins of a histogram; None for none.

    Returns:
      The function, and a dict that is filled, in the order of the computation, when it is traced.
    """
    strategy = runner.strategy
    loop = runner.train_loop
    marker = _Marker(runner.model.module_types)
    hooks = [hook for hook in runner.hooks if not hook.update_on_skipped_steps]
    step = build_train_step(
        runner.model,
        runner.optim_wrapper,
        [*hooks, marker],
        update=update,
        phases=loop.settings.phases,
        constrain=strategy.constrain,
        gather_tables=strategy.gather_tables,
        micro_batches=loop.micro_batches,
    )
    kinds: dict[str, Origin] = {}
    axis = strategy.axis_name

    def inspect(state: TrainState, batch: Batch, hyperparams: Any) -> Any:
        shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        sizes = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
        size = sizes.pop() if len(sizes) == 1 and axis is None else None

        def visit(path: str, array: jax.Array) -> RecordedValue | None:
            if patterns is not None and not matches(path, patterns):
                available[path] = None
                return None
            shapes.setdefault(path, (array.shape, str(array.dtype)))
            # what all replicas have counts once
            mapped = None if path.startswith(("params.", "updates.")) else axis
            return _measure(array, mapped, bins, arrays, size)

        available: dict[str, None] = {}
        values, seen = collect(step, visit, state, batch, hyperparams)
        check_patterns(patterns, [*values, *available])
        kinds.clear()
        for path in values:
            kinds[path] = Origin(*shapes[base_path(path)], seen[path])
        if loop.micro_batches > 1:  # each has values of its own
            values = {
                path: _merge_parts(value) if seen[path].scan is not None else value
                for path, value in values.items()
            }
        return state, values

    program = on_whole_batches(inspect, runner.train_dataloader.batch_rules is not None)
    rules = runner.train_dataloader.batch_rules
    return strategy.compile_train_step(program, rules=rules), kinds


def put_batch(runner: Any, batch: Batch) -> Batch:
    """Return a batch on the devices; hooks get that of a chunk on the host."""
    batch = select_arrays(batch)
    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch)):
        return runner.strategy.put_batch(batch, rules=runner.train_dataloader.batch_rules)
    return batch


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns means a value: its path or that of a level around it, with
    wildcards; 'activations' are the outputs of all layers and all sown values.

    >>> matches("blocks.3.attn.q", ["blocks.3.attn"]), matches("grads.head.bias", ["grads.*.bias"])
    (True, True)
    """
    if "activations" in patterns and not path.startswith((*_STEP_VALUES, GRADIENT)):
        return True
    parts = path.split(".")
    levels = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(level, pattern) for level in levels for pattern in patterns)


def check_patterns(patterns: Sequence[str] | None, known: Sequence[str]) -> None:
    """Raise ConfigError for a pattern that matches no value."""
    for pattern in patterns or ():
        if any(matches(path, [pattern]) for path in known):
            continue
        if pattern == "activations":
            raise ConfigError(
                "a path must match a value of the step, got 'activations' for a model that calls "
                "no Linen or NNX modules"
            )
        names = [path for path in known if not path.startswith(GRADIENT)]
        raise ConfigError(
            f"a path must match a value of the step, got {pattern!r}"
            f"{paths.closest_paths(pattern, names)}"
        )


def split_layers(
    values: Mapping[str, RecordedValue], kinds: Mapping[str, Origin]
) -> dict[str, RecordedValue]:
    """Return fetched values with an entry for each layer of a stack: 'blocks.attn.0'.

    In the order of the computation.
    """
    return {name: value for path in kinds for _, name, value in _split(path, values[path])}


def read_statistics(
    value: RecordedValue, names: Sequence[Statistic] = STATISTICS
) -> dict[str, float]:
    """Return the statistics of a fetched value by name; NaN if no element is finite."""
    mean, square, largest, zeros, bad, _ = map(float, value.moments)
    share = 1.0 - bad
    known = {
        "mean": mean / share if share else np.nan,
        "rms": np.sqrt(square / share) if share else np.nan,
        "max": largest if share else np.nan,
        "zeros": zeros,
        "nonfinite": bad,
    }
    return {name: float(known[name]) for name in names}


def in_order(
    values: Mapping[str, RecordedValue], kinds: Mapping[str, Origin]
) -> list[tuple[str, RecordedValue]]:
    """Return fetched values in the order in which the step computes them, each layer of a stack by
    itself.
    """
    entries: list[tuple[tuple[float, int, int], str, RecordedValue]] = []
    starts: dict[int, float] = {}
    gradients = [i for i, path in enumerate(kinds) if path.startswith(GRADIENT)]
    for position, (path, kind) in enumerate(kinds.items()):
        layers = values[path].moments.shape[:-1]
        for turn, name, value in _split(path, values[path]):
            if kind.seen.is_reversed:
                turn = int(np.prod(layers)) - 1 - turn
            # All values in one turn of a scan come before those in the next
            start = starts.setdefault(kind.seen.scan, position) if kind.seen.scan else position
            # Hooks see the losses only after the gradients
            if path.startswith("loss.") and gradients:
                start = min(start, gradients[0] - 0.5)
            entries.append(((start, turn, position), name, value))
    return [(name, value) for _, name, value in sorted(entries, key=lambda entry: entry[0])]


def _split(path: str, value: RecordedValue) -> Iterator[tuple[int, str, RecordedValue]]:
    """Yield number, path and value for each layer of a stack."""
    layers = value.moments.shape[:-1]
    for number, index in enumerate(np.ndindex(layers)):
        name = ".".join((path, *map(str, index)))
        yield number, name, jax.tree.map(operator.itemgetter(index), value) if layers else value


class _Marker:
    """Last traced hook, which marks the batch, losses, gradients, updates and parameters."""

    update_on_skipped_steps = False

    def __init__(self, module_types: Mapping[str, str]) -> None:
        self._types = module_types

    def get_traced_points(self) -> list[str]:
        return ["traced_batch", "traced_grads", "traced_update", "traced_accumulate"]

    def traced_batch(self, ctx: StepContext) -> StepContext:
        return ctx.replace(batch=mark("batch", ctx.batch))

    def traced_grads(self, ctx: StepContext) -> StepContext:
        losses = {name: x for name, x in ctx.metrics.items() if "loss" in name}
        marked = {name: mark(f"loss.{name}", x) for name, x in losses.items()}
        return ctx.replace(
            metrics={**ctx.metrics, **marked}, grads=self._mark_layers("grads", ctx.grads)
        )

    def traced_update(self, ctx: StepContext) -> StepContext:
        updates = jax.tree.map(
            lambda new, old: (
                new.astype(jnp.float32) - old.astype(jnp.float32)
                if jnp.issubdtype(new.dtype, jnp.floating)
                else jnp.zeros_like(new)
            ),
            ctx.params,
            ctx.old_params,
        )
        updates = self._mark_layers("updates", updates)
        params = self._mark_layers("params", ctx.params)
        # Used, or the trace would drop them; the new state is not
        params = jax.tree.map(lambda p, u: p + (0 * u).astype(p.dtype), params, updates)
        return ctx.replace(params=params)

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        return ctx.replace(params=self._mark_layers("params", ctx.params))

    def _mark_layers(self, name: str, tree: PyTree) -> PyTree:
        """Mark the leaves, each layer of stacked parameters by itself."""

        def mark_leaf(path: str, leaf: Any) -> Any:
            axes = stacked_axes(self._types, path) if jnp.ndim(leaf) else None
            full = f"{name}.{path}"
            if not axes or not jnp.issubdtype(leaf.dtype, jnp.floating):
                return mark(full, leaf)
            if len(axes) > 1:
                return mark(full, leaf)
            layers = jnp.moveaxis(leaf, axes[0], 0)
            _, layers = jax.lax.scan(lambda _, x: (None, mark(full, x)), None, layers)
            return jnp.moveaxis(layers, 0, axes[0])

        return paths.map_with_path(mark_leaf, tree)


def _measure(
    array: jax.Array, axis: str | None, bins: int | None, keeps: bool, batch_size: int | None
) -> RecordedValue:
    x = array.astype(jnp.float32)
    finite = jnp.isfinite(x)
    safe = jnp.where(finite, x, 0.0)
    size = max(x.size, 1)
    sums = [safe.sum(), jnp.square(safe).sum(), (x == 0).sum(), (~finite).sum(), jnp.isnan(x).sum()]
    means = jnp.stack([each.astype(jnp.float32) for each in sums]) / size
    largest = jnp.where(finite, x, -jnp.inf).max(initial=-jnp.inf)
    if axis is not None:
        means = jax.lax.pmean(means, axis)
        largest = jax.lax.pmax(largest, axis)
    moments = jnp.concatenate([means[:2], largest[None], means[2:]])
    has_batch = batch_size is not None and x.ndim > 0 and x.shape[0] == batch_size
    return RecordedValue(
        moments,
        None if bins is None else bin_elements(x, bins, axis),
        array if keeps else None,
        (~finite).any(axis=tuple(range(1, x.ndim))) if has_batch else None,
    )


def _merge_parts(value: RecordedValue) -> RecordedValue:
    """Return one value for the parts of a batch, the axis in front."""
    moments = value.moments.mean(0).at[..., 2].set(value.moments[..., 2].max(0))
    return RecordedValue(moments, None, value.array, None)
