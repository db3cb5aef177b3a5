"""Several iterations in one call of a compiled function: the steps run in a loop on the device."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.apart import set_apart
from jengine.data.collate import is_flat
from jengine.packed import pack_rows, unpack
from jengine.train.state import TrainState
from jengine.train.step import Outputs, TrainStep

PyTree = Any


class UnfitForALoopError(Exception):
    """A step holds an operation that XLA compiles to something slow, and not bit-equal, within a loop."""


class WindowStep:
    """`window(state, batches, rows) -> (state, outputs)`: several steps, pure and not compiled.

    They run in a loop: the same operations as one call for each step, so the same numbers. One compiled program serves
    any number of steps up to the number of rows. Like a step it takes the state, a batch whose first axis is divided
    over devices, and numbers that all devices share, so that whatever compiles a step compiles a window.

    Args:
      update: the step that updates.
      accumulate: the step that only accumulates, for a run that has such iterations.
      unfit: names of JAX primitives that must not be in a loop.
      axis: the axis of the steps in the arrays of batches.

    Attributes:
      reported: the outputs of a step that updates (True) and of one that accumulates (False), filled by the trace.
    """

    def __init__(
        self, update: TrainStep, accumulate: TrainStep | None = None, unfit: Sequence[str] = (), axis: int = 1
    ) -> None:
        self.reported: dict[bool, tuple[str, ...]] = {}
        self._steps = {True: update} if accumulate is None else {True: update, False: accumulate}
        self._unfit = unfit
        self._axis = axis

    def __call__(self, state: TrainState, batches: PyTree, rows: Mapping[str, Any]) -> tuple[TrainState, Outputs]:
        """Runs the steps.

        Args:
          state: before the first of them.
          batches: what `stack_batches` gives.
          rows: what `stack_numbers` gives.

        Returns:
          The state after the last of them, and their outputs, f32[size] by name, with NaN where a step does not report
          the name; what follows the first `count` means nothing.

        Raises:
          UnfitForALoopError: a step has one of the primitives `unfit`.
        """

        def inputs(i: Any) -> tuple[PyTree, PyTree]:
            return _row(batches, i, self._axis), unpack(_row(rows["hyperparams"], i))

        shapes = self._shapes(state, *inputs(0))

        def body(i: jax.Array, carry: tuple[TrainState, Outputs]) -> tuple[TrainState, Outputs]:
            """The step of row `i`."""
            state, outputs = carry
            steps = [_reporting(step, shapes) for step in self._steps.values()]
            if len(steps) == 1:
                state, new = steps[0](state, *inputs(i))
            else:
                state, new = jax.lax.cond(rows["updates"][i], *steps, state, *inputs(i))
            return state, {k: jax.lax.dynamic_update_index_in_dim(outputs[k], new[k], i, 0) for k in outputs}

        empty = {k: _nothing((*rows["updates"].shape, *s.shape), s.dtype) for k, s in shapes.items()}
        return jax.lax.fori_loop(0, rows["count"], body, (state, empty))

    def _shapes(self, *args: PyTree) -> Outputs:
        """The outputs of all steps, in form."""
        shapes: Outputs = {}
        for updates, step in self._steps.items():
            jaxpr, (_, outputs) = jax.make_jaxpr(step, return_shape=True)(*args)
            found = [name for name in self._unfit if name in str(jaxpr)]
            if found:
                raise UnfitForALoopError(found[0])
            self.reported[updates] = tuple(outputs)
            shapes |= outputs
        return shapes


class RowStep:
    """`step(state, batches, rows) -> (state, outputs)`: one of several steps whose inputs went to the device together.

    For a short step on a small batch the way of the inputs to the device takes as long as the call.

    Args:
      update: the step that updates.
    """

    def __init__(self, update: TrainStep) -> None:
        self._update = update

    def __call__(self, state: TrainState, batches: PyTree, rows: Mapping[str, Any]) -> tuple[TrainState, Outputs]:
        """Runs one step.

        Args:
          state: before it.
          batches: what `stack_batches` gives for the axis 0.
          rows: `dict(hyperparams=..., outputs=..., row=int32[])`: what `pack_rows` gives, what the steps before it have
            reported, and which of the steps it is.

        Returns:
          The state after it, and the outputs with its own.
        """
        i = rows["row"]
        batch, numbers = set_apart(_row)((batches, rows["hyperparams"]), i)
        state, new = self._update(state, batch, unpack(numbers))
        return state, set_apart(_set_row)(rows["outputs"], new, i)


def _reporting(step: TrainStep, shapes: Outputs) -> TrainStep:
    """The step with all of the outputs `shapes`, those that it has not as NaN."""

    def run(state: TrainState, batch: PyTree, numbers: Mapping[str, Any]) -> tuple[TrainState, Outputs]:
        state, outputs = step(state, batch, numbers)
        return state, {k: outputs[k] if k in outputs else _nothing(s.shape, s.dtype) for k, s in shapes.items()}

    return run


def stack_batches(batches: Sequence[PyTree], size: int, axis: int = 1) -> PyTree:
    """The host batches of several steps as a window takes them.

    Args:
      batches: of equal form, at most `size` of them.
      size: the rows of the window; those without a batch hold anything.
      axis: of the rows: 1 leaves the examples in front, to be divided over devices; 0 takes half the time.
    """

    def stack(leaves: Sequence[Any]) -> Any:
        """One leaf of all batches."""
        if isinstance(leaves[0], jax.Array):
            missing = size - len(leaves)
            return jnp.stack([*leaves, *[leaves[-1]] * missing], axis=min(leaves[0].ndim, axis))
        first = np.asarray(leaves[0])
        place = min(first.ndim, axis)
        stacked = np.empty((*first.shape[:place], size, *first.shape[place:]), first.dtype)
        rows = stacked.swapaxes(0, place)
        if first.ndim and place == 0:
            np.concatenate(leaves, out=rows[: len(leaves)].reshape(-1, *first.shape[1:]))
        else:
            for row, leaf in enumerate(leaves):
                rows[row] = leaf
        return stacked

    if is_flat(batches[0]):  # the usual batch, for which a walk over many trees costs as much as all the rest
        return {name: stack([batch[name] for batch in batches]) for name in batches[0]}
    return jax.tree.map(lambda *leaves: stack(leaves), *batches)


def stack_numbers(columns: Mapping[str, Any], updates: Sequence[bool], size: int) -> dict[str, Any]:
    """What a window takes beside the batches, `dict(hyperparams=..., updates=bool[size], count=int32[])`.

    Args:
      columns: the hyperparameters, host arrays with a row for each step.
      updates: whether each step updates, or only accumulates.
      size: the rows of the window.
    """
    return dict(
        hyperparams=pack_rows(columns, size),
        updates=np.asarray([*updates, *[False] * (size - len(updates))]),
        count=np.int32(len(updates)),
    )


def _row(arrays: PyTree, i: Any, axis: int = 0) -> PyTree:
    """Row `i` of each array, along `axis` or the last that it has."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, min(x.ndim - 1, axis), keepdims=False), arrays)


def _set_row(arrays: PyTree, values: PyTree, i: Any) -> PyTree:
    """Each array with a value in row `i`."""
    return jax.tree.map(lambda x, value: jax.lax.dynamic_update_index_in_dim(x, value, i, 0), arrays, values)


def _nothing(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)


class Series(NamedTuple):
    """One output over several iterations.

    Attributes:
      values: a row for each iteration, in one array or as a list of arrays.
      rows: the iterations that reported it; the rows of others mean nothing.
    """

    values: jax.Array | Sequence[jax.Array]
    rows: Sequence[int]


class WindowOutputs(Mapping[str, jax.Array]):
    """The outputs of the last of several iterations, with those of all of them beside.

    Args:
      series: by name.
      rates: what `get_lr` of the optimizer wrapper said at each iteration.

    Attributes:
      series, rates: as given.
      count: how many iterations there were.
    """

    def __init__(self, series: Mapping[str, Series], rates: Sequence[Mapping[str, Sequence[float]]]) -> None:
        self.series = series
        self.rates = rates
        self.count = len(rates)
        self._last = self.count - 1

    @classmethod
    def of(
        cls, outputs: Sequence[Mapping[str, jax.Array]], rates: Sequence[Mapping[str, Sequence[float]]]
    ) -> "WindowOutputs":
        """Those of iterations that had a call each."""
        names = dict.fromkeys(name for of_one in outputs for name in of_one)
        series = {}
        for name in names:
            rows = [row for row, of_one in enumerate(outputs) if name in of_one]
            series[name] = Series([of_one.get(name, of_one["loss"]) for of_one in outputs], rows)
        return cls(series, rates)

    def __getitem__(self, name: str) -> jax.Array:
        values, rows = self.series[name]
        if self._last not in rows:
            raise KeyError(name)
        return values[self._last]

    def read(self, name: str) -> float:
        """The number `self[name]`, for which this waits. To take it out of an array on the host spares two programs."""
        values, rows = self.series[name]
        if self._last not in rows:
            raise KeyError(name)
        last = np.asarray(values)[self._last] if isinstance(values, jax.Array) else values[self._last]
        return float(last)

    def __iter__(self) -> Iterator[str]:
        return (name for name, (_, rows) in self.series.items() if self._last in rows)

    def __len__(self) -> int:
        return sum(1 for _ in self)
