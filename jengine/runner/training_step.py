"""The compiled programs of a training run, and the one call that an iteration makes."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.logging import TimeAccount
from jengine.parallel import InFlight, ResidentState
from jengine.runner.standing_numbers import StandingNumbers
from jengine.train import COMPILES, TraceOnce, TrainState, build_train_step, count_flops
from jengine.train.flops import Flops
from jengine.train.step import Outputs
from jengine.train.window import Series, UnfitForALoopError, WindowOutputs, WindowStep, stack_batches, stack_numbers

PyTree = Any
State = TrainState | ResidentState


_SLOW_IN_LOOPS = ("conv_general_dilated",)  # on CPUs; https://github.com/jax-ml/jax/issues/12868


class PlannedStep(NamedTuple):
    """What the host has decided about an iteration before it runs.

    Attributes:
      batch: what it sees.
      updates: whether it updates, or only accumulates.
      hyperparams: the numbers that it takes.
      rates: what `get_lr` of the optimizer wrapper says.
    """

    batch: PyTree
    updates: bool
    hyperparams: Mapping[str, Any]
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
      update: the pure step that updates. accumulate: the one that only accumulates. window: several, of both kinds.
      unfit: whether it has turned out that several iterations in one call would be slow on this device.
      before_error: the outputs of the iterations before the one of several in which `each` has failed.
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
        several = WindowStep(steps[0], steps[1] if accumulates else None, unfit)
        pure: list[Callable[..., Any]] = [*steps, several]
        self._programs = [TraceOnce(step, ("state", "batch", "hyperparams"), retrace=retrace) for step in pure]
        self.update, self.accumulate, self.window = self._programs
        self._compiled = {step: strategy.compile_resident_step(step) for step in self._programs}
        put = functools.partial(_put, getattr(strategy, "device", None))
        self._standing = {step: StandingNumbers(put) for step in self._programs}
        self._several = several
        self.unfit = False
        self.before_error: WindowOutputs | None = None

    def __call__(self, state: State, batch: PyTree, scalars: Mapping[str, Any]) -> tuple[State, Outputs]:
        """Dispatches one iteration.

        Args:
          state: donated; whole or in pieces, as the call before has left it.
          batch: on its device.
          scalars: what hooks hand to the step, beside the numbers of the optimizer.

        Returns:
          The new state and the outputs, both in the making.
        """
        step = self.update if self._optim_wrapper.advance() else self.accumulate
        return self._dispatch(step, state, batch, {**self._optim_wrapper.hyperparams, **scalars})

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
                state, of_one = self._dispatch(step, state, planned.batch, planned.hyperparams)
                outputs.append(of_one)
                rates.append(planned.rates)
        except Exception:
            self.before_error = WindowOutputs.of(outputs, rates) if outputs else None
            raise
        return state, outputs[0] if len(outputs) == 1 else WindowOutputs.of(outputs, rates)

    def several(self, state: State, plan: Sequence[PlannedStep], size: int) -> tuple[State, Mapping[str, jax.Array]]:
        """Dispatches several iterations in one call.

        Args:
          state: donated; whole or in pieces, as the call before has left it.
          plan: what the host has decided for each iteration, with host batches of equal form.
          size: the most iterations that a call may have; the program is compiled for it.

        Returns:
          The new state and the outputs, both in the making.
        """
        updates = [planned.updates for planned in plan]
        rows = stack_numbers([planned.hyperparams for planned in plan], updates, size)
        put = self._strategy.put_batch
        try:
            batch = put(stack_batches([planned.batch for planned in plan], size))
            state, stacked = self._dispatch(self.window, state, batch, rows)
        except UnfitForALoopError:
            self.unfit = True
            return self.each(state, (planned._replace(batch=put(planned.batch)) for planned in plan))
        reported = self._several.reported
        series = {
            name: Series(values, [row for row, u in enumerate(updates) if name in reported[u]])
            for name, values in stacked.items()
        }
        return state, WindowOutputs(series, [planned.rates for planned in plan])

    def _dispatch(self, step: TraceOnce, state: State, batch: PyTree, numbers: Mapping[str, Any]) -> Any:
        """One call; the time runs for 'step' from then on."""
        numbers = self._standing[step](numbers)
        self._time.switch("step")
        compiles = COMPILES.count
        self._in_flight.wait()
        new, outputs = self._compiled[step](state, batch, numbers)
        if COMPILES.count != compiles:
            self._time.was("compile")
            step.look(state.whole() if isinstance(state, ResidentState) else state, batch, numbers)
        self._in_flight.add(outputs["loss"])
        return new, outputs

    def flops(self) -> Flops:
        """Operations of an iteration over all devices, see `count_flops`; nothing before the first, nor for a pmap."""
        for step, program in self._compiled.items():
            if step.shapes is not None and hasattr(program, "trace"):
                return count_flops(program.trace(*step.shapes).jaxpr)
        return {}


def _put(device: jax.Device | None, value: Any) -> jax.Array:
    """Sends a number to `device`, None for the default one, without tying it there."""
    with jax.default_device(device):
        return jnp.asarray(value)
