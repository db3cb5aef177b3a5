"""Several iterations in one call of a compiled function: the steps run in a loop on the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.train.state import TrainState
from jengine.train.step import Outputs, TrainStep

PyTree = Any
WindowStep = Callable[[TrainState, PyTree, PyTree, jax.Array, jax.Array], tuple[TrainState, Outputs]]


def build_window_step(update: TrainStep, accumulate: TrainStep | None = None) -> WindowStep:
    """Builds `window(state, batches, hyperparams, updates, count) -> (state, outputs)`, pure and not compiled.

    It runs `count` steps, each with its row of what it is given: the same operations as one call for each step, so the
    same numbers. One compiled program serves every `count` up to the number of rows.

    Args:
      update: the step that updates.
      accumulate: the step that only accumulates, for a run that has such iterations.

    Returns:
      The function. Of `batches`, `hyperparams` and `updates` (bool[rows]: which iterations update) every leaf has one
      entry more in front, a row for each iteration; `count` is int32[]. Its outputs are f32[rows] by name, with NaN
      where an iteration does not report the name; rows from `count` on mean nothing.
    """

    def window(
        state: TrainState, batches: PyTree, hyperparams: PyTree, updates: jax.Array, count: jax.Array
    ) -> tuple[TrainState, Outputs]:
        def inputs(i: Any) -> tuple[PyTree, PyTree]:
            return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), (batches, hyperparams))

        steps = [update] if accumulate is None else [update, accumulate]
        shapes: Outputs = {}
        for step in steps:
            shapes |= jax.eval_shape(step, state, *inputs(0))[1]

        def all_outputs(step: TrainStep) -> TrainStep:
            def run(state: TrainState, batch: PyTree, numbers: Mapping[str, Any]) -> tuple[TrainState, Outputs]:
                state, outputs = step(state, batch, numbers)
                missing = {k: _nothing(s.shape, s.dtype) for k, s in shapes.items() if k not in outputs}
                return state, {**outputs, **missing}

            return run

        def body(i: jax.Array, carry: tuple[TrainState, Outputs]) -> tuple[TrainState, Outputs]:
            state, outputs = carry
            if accumulate is None:
                state, new = update(state, *inputs(i))
            else:
                state, new = jax.lax.cond(updates[i], all_outputs(update), all_outputs(accumulate), state, *inputs(i))
            rows = {k: jax.lax.dynamic_update_index_in_dim(outputs[k], new[k], i, 0) for k in outputs}
            return state, rows

        empty = {k: _nothing((*updates.shape, *s.shape), s.dtype) for k, s in shapes.items()}
        return jax.lax.fori_loop(0, count, body, (state, empty))

    return window


def _nothing(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)


class Series(NamedTuple):
    """One output over the iterations of a call: the rows of `values` that iterations reported it in."""

    values: jax.Array
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

    def __getitem__(self, name: str) -> jax.Array:
        values, rows = self.series[name]
        if self._last not in rows:
            raise KeyError(name)
        return values[self._last]

    def __iter__(self) -> Iterator[str]:
        return (name for name, (_, rows) in self.series.items() if self._last in rows)

    def __len__(self) -> int:
        return sum(1 for _ in self)
