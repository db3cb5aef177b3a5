"""The compiled programs of a training run, and the one call that an iteration makes."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.logging import TimeAccount
from jengine.packed import Packed, pack_rows, unpack
from jengine.parallel import Coming, InFlight, InterruptedRowsError, ResidentState
from jengine.runner.number_packer import NumberPacker
from jengine.train import COMPILES, TraceOnce, TrainState, build_train_step, count_flops
from jengine.train.flops import Flops
from jengine.train.step import Outputs
from jengine.train.window import (
    RowStep,
    Series,
    UnfitForALoopError,
    WindowOutputs,
    WindowStep,
    stack_batches,
    stack_numbers,
)

PyTree = Any
State = TrainState | ResidentState | Coming


_SLOW_IN_LOOPS = ("conv_general_dilated",)  # on CPUs; https://github.com/jax-ml/jax/issues/12868


class PlannedStep(NamedTuple):
    """What the host has decided about an iteration before it runs.

    Attributes:
      batch: what it sees.
      updates: whether it updates, or only accumulates.
      numbers: the hyperparameters by name; for iterations that are taken together what they are made of, a pair of the
        wrapper's `settings` and of the scalars that hooks hand to the step.
      rates: what `get_lr` of the optimizer wrapper says.
    """

    batch: PyTree
    updates: bool
    numbers: Any
    rates: Mapping[str, Sequence[float]]


class TrainingStep:
    """The compiled programs: the step that updates, the one that only accumulates, and several of both in one call.

    Each is compiled at its first call, as a rule once.

    Args:
      model: gives the losses.
      optim_wrapper: knows which iterations update, and owns the numbers of the optimizer.
      hooks: those with traced points are compiled in.
      strategy: compiles.
      in_flight: bounds how far the host runs ahead.
      time: the account of the run.
      phases: see `build_train_step`.
      retrace: 'warn' or 'raise'; see `TraceOnce`.

    Attributes:
      update: the pure step that updates. accumulate: the one that only accumulates. either: one of both kinds.
      window: several, of both kinds. row: one that updates, of several whose inputs went to the device together.
      accumulates: whether there are steps that only accumulate.
      unfit: whether it has turned out that several iterations in one call would be slow on this device.
      before_error: the outputs of the iterations before the one of several that has failed.
    """

    def __init__(
        self,
        model: Any,
        optim_wrapper: Any,
        hooks: Sequence[Any],
        strategy: Any,
        in_flight: InFlight,
        time: TimeAccount,
        phases: Sequence[tuple[str, int]] | None = None,
        retrace: str | None = None,
    ) -> None:
        self._optim_wrapper = optim_wrapper
        self._strategy = strategy
        self._in_flight = in_flight
        self._time = time
        steps = [build_train_step(model, optim_wrapper, hooks, update=u, phases=phases) for u in (True, False)]
        accumulates = getattr(optim_wrapper, "accumulative_counts", 1) > 1
        unfit = _SLOW_IN_LOOPS if strategy.platform == "cpu" else ()
        self._axis = 0 if getattr(strategy, "takes_host_batches", False) else 1
        several = WindowStep(steps[0], steps[1] if accumulates else None, unfit, self._axis)
        pure: list[Callable[..., Any]] = [*steps, several, several, RowStep(steps[0])]
        self.accumulates = accumulates
        self._programs = [TraceOnce(step, ("state", "batch", "hyperparams"), retrace=retrace) for step in pure]
        self.update, self.accumulate, self.either, self.window, self.row = self._programs
        whole = self._programs[:-1]
        self._compiled = {step: strategy.compile_resident_step(_unpacking(step)) for step in whole}
        self._pack = NumberPacker(functools.partial(_put, getattr(strategy, "device", None)))
        self._outputs: dict[str, jax.ShapeDtypeStruct] = {}  # of the step that updates, once it ran
        self._rows: Any = None
        self._size = 0  # of its arrays
        self._several = several
        self.unfit = False
        self.before_error: WindowOutputs | None = None

    def __call__(self, state: State, batch: PyTree, scalars: Mapping[str, Any]) -> tuple[State, Outputs]:
        """Dispatches one iteration.

        Args:
          state: donated; whole or in pieces, as the call before has left it, or still being made.
          batch: on its device.
          scalars: what hooks hand to the step, beside the numbers of the optimizer.

        Returns:
          The new state and the outputs, both in the making.
        """
        step = self.update if self._optim_wrapper.advance() else self.accumulate
        return self._one(step, state, batch, {**self._optim_wrapper.hyperparams, **scalars})

    def each(self, state: State, plan: Iterable[PlannedStep]) -> tuple[State, Mapping[str, jax.Array]]:
        """Dispatches several iterations, one after the other.

        Args:
          state: donated; whole or in pieces, as the call before has left it.
          plan: what the host has decided for each iteration, with batches that are on their device.

        Returns:
          The new state and the outputs, `WindowOutputs` where there was more than one iteration; both in the making.
        """
        outputs: list[Outputs] = []
        rates = []
        try:
            for planned in plan:
                step = self.update if planned.updates else self.accumulate
                state, of_one = self._one(step, state, planned.batch, planned.numbers)
                outputs.append(of_one)
                rates.append(planned.rates)
        except Exception:
            self.before_error = WindowOutputs.of(outputs, rates)
            raise
        return state, outputs[0] if len(outputs) == 1 else WindowOutputs.of(outputs, rates)

    def several(self, state: State, plan: Sequence[PlannedStep], size: int) -> tuple[State, Mapping[str, jax.Array]]:
        """Dispatches several iterations in one call.

        Args:
          state: donated; whole or in pieces, as the call before has left it.
          plan: what the host has decided for each iteration, with host batches of equal form.
          size: the most iterations that a call may have; the program is compiled for it. A run may have calls of one
            iteration and of one larger size.

        Returns:
          The new state and the outputs, both in the making.
        """
        updates = [planned.updates for planned in plan]
        columns = self._columns(plan)
        rows = stack_numbers(columns, updates, size)
        put = self._strategy.put_batch
        try:
            batch = put(stack_batches([planned.batch for planned in plan], size, self._axis))
            state, stacked = self._dispatch(self.window if size > 1 else self.either, state, batch, rows)
        except UnfitForALoopError:
            self.unfit = True
            return self.each(state, self._apart(plan, columns))
        reported = self._several.reported
        series = {
            name: Series(values, [row for row, u in enumerate(updates) if name in reported[u]])
            for name, values in stacked.items()
        }
        return state, WindowOutputs(series, [planned.rates for planned in plan])

    def takes_rows(self, size: int) -> bool:
        """Whether `by_rows` is of use: once a step has run, where none only accumulates, on a device that is for it.

        Args:
          size: the most iterations that it may be asked for; the first time counts.
        """
        if self._rows is None and self._outputs and not self.accumulates:
            outputs = {name: jax.ShapeDtypeStruct((size, *o.shape), o.dtype) for name, o in self._outputs.items()}
            self._rows = getattr(self._strategy, "compile_rows", lambda *_: None)(self.row, outputs)
            self._size = size
        return self._rows is not None

    def by_rows(self, state: State, plan: Sequence[PlannedStep]) -> tuple[State, Mapping[str, jax.Array]]:
        """Dispatches several iterations, one after the other, whose inputs go to the device together.

        Args:
          state: donated; whole or in pieces, as the call before has left it.
          plan: what the host has decided for each iteration, with host batches of equal form; not more than
            `takes_rows` was told.

        Returns:
          The new state and the outputs, both in the making.
        """
        batches = stack_batches([planned.batch for planned in plan], self._size, axis=0)
        numbers = pack_rows(self._columns(plan), self._size)
        self._time.switch("step")
        compiles = COMPILES.count
        self._in_flight.wait()
        try:
            new, stacked = self._rows.run(state, batches, numbers, len(plan))
        except InterruptedRowsError as error:
            self.before_error = _first_rows(error.outputs, plan[: error.done])
            raise error.__cause__ or error from None
        if COMPILES.count != compiles:
            self._time.was("compile")
            rows = {"hyperparams": numbers, "outputs": stacked, "row": np.int32(0)}
            self.row.look(_whole(state, new), batches, rows)
        self._in_flight.add(stacked["loss"])
        return new, _first_rows(stacked, plan)

    def _columns(self, plan: Sequence[PlannedStep]) -> dict[str, Any]:
        """The hyperparameters of several iterations, host arrays with a row for each.

        Raises:
          ValueError: a hook's scalar came or went between two of them.
        """
        columns = self._optim_wrapper.hyperparams_of([planned.numbers[0] for planned in plan])
        scalars = [planned.numbers[1] for planned in plan]
        for other in scalars:
            if other.keys() != scalars[0].keys():
                raise ValueError(
                    f"iterations that are taken together need the same hyperparams, found {sorted(scalars[0])} and "
                    f"then {sorted(other)}: set them before training, or in a hook that cuts (`Hook.in_windows`)"
                )
        return columns | {name: np.array([of_one[name] for of_one in scalars]) for name in scalars[0]}

    def _apart(self, plan: Sequence[PlannedStep], columns: Mapping[str, Any]) -> Iterator[PlannedStep]:
        """The plan of iterations that were to be taken together, for a call each."""
        for row, planned in enumerate(plan):
            numbers = jax.tree.map(lambda column, row=row: column[row], columns)
            yield planned._replace(batch=self._strategy.put_batch(planned.batch), numbers=numbers)

    def _one(self, step: TraceOnce, state: State, batch: PyTree, hyperparams: Mapping[str, Any]) -> Any:
        """One iteration in a call."""
        return self._dispatch(step, state, batch, self._pack(hyperparams))

    def _dispatch(self, step: TraceOnce, state: State, batch: PyTree, numbers: PyTree) -> Any:
        """One call; the time runs for 'step' from then on."""
        self._time.switch("step")
        compiles = COMPILES.count
        self._in_flight.wait()
        program = self._compiled[step]
        if type(state) is Coming:
            if hasattr(program, "trace"):  # a pmap has none
                program.trace(state.shapes, batch, numbers).lower()  # which the call then finds done
            state = state.whole()
        new, outputs = program(state, batch, numbers)
        if COMPILES.count != compiles:
            self._time.was("compile")
            step.look(_whole(state, new), batch, numbers)
            if step is self.update:
                self._outputs = {name: jax.ShapeDtypeStruct(o.shape, o.dtype) for name, o in outputs.items()}
        self._in_flight.add(outputs["loss"])
        return new, outputs

    def flops(self) -> Flops:
        """Operations of an iteration over all devices, see `count_flops`; nothing before the first, nor for a pmap."""
        for step, program in self._compiled.items():
            if step.shapes is not None and hasattr(program, "trace"):
                return count_flops(program.trace(*step.shapes).jaxpr)
        return {}


def _first_rows(outputs: Outputs, plan: Sequence[PlannedStep]) -> WindowOutputs:
    """The outputs of the iterations of a plan, each of which reports all names, from the first rows of arrays."""
    series = {name: Series(values, range(len(plan))) for name, values in outputs.items()}
    return WindowOutputs(series, [planned.rates for planned in plan])


def _whole(state: State, new: State) -> State:
    """The state that a call took, or one like it: pieces are donated, and what they lay on is what `new` lies on."""
    return new.whole() if isinstance(state, ResidentState) and isinstance(new, ResidentState) else state


def _unpacking(step: TraceOnce) -> Callable[..., Any]:
    """The step for packed numbers. Several steps unpack those of each themselves."""

    def run(state: TrainState, batch: PyTree, numbers: Packed | Mapping[str, Any]) -> Any:
        return step(state, batch, unpack(numbers))

    return run


def _put(device: jax.Device | None, value: Any) -> jax.Array:
    """Sends a number to `device`, None for the default one, without tying it there."""
    with jax.default_device(device):
        return jnp.asarray(value)
