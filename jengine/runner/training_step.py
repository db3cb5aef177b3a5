"""The compiled programs of a training run, and the one call that an iteration makes."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.logging import TimeAccount
from jengine.parallel import InFlight
from jengine.runner.standing_numbers import StandingNumbers
from jengine.train import COMPILES, TraceOnce, TrainState, build_train_step

PyTree = Any


class TrainingStep:
    """The step that updates and the one that only accumulates, each compiled at its first call, as a rule once.

    Args:
      model: gives the losses.
      optim_wrapper: knows which iterations update, and owns the numbers of the optimizer.
      hooks: those with traced points are compiled in.
      strategy: compiles.
      phases: see `build_train_step`.
      retrace: 'warn' or 'raise'; see `TraceOnce`.

    Attributes:
      update: the pure step that updates. accumulate: the one that only accumulates.
    """

    def __init__(
        self,
        model: Any,
        optim_wrapper: Any,
        hooks: Sequence[Any],
        strategy: Any,
        phases: Sequence[tuple[str, int]] | None = None,
        retrace: str | None = None,
    ) -> None:
        arguments = ("state", "batch", "hyperparams")
        self._optim_wrapper = optim_wrapper
        self.update, self.accumulate = (
            TraceOnce(
                build_train_step(model, optim_wrapper, hooks, update=update, phases=phases), arguments, retrace=retrace
            )
            for update in (True, False)
        )
        self._standing = StandingNumbers(functools.partial(_put, getattr(strategy, "device", None)))
        self._compiled = {step: strategy.compile_train_step(step) for step in (self.update, self.accumulate)}

    def __call__(
        self, state: TrainState, batch: PyTree, scalars: Mapping[str, Any], in_flight: InFlight, time: TimeAccount
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Dispatches one iteration.

        Args:
          state: donated.
          batch: on its device.
          scalars: what hooks hand to the step, beside the numbers of the optimizer.
          in_flight: bounds how far the host runs ahead.
          time: the account of the run.

        Returns:
          The new state and the outputs, both in the making.
        """
        step = self.update if self._optim_wrapper.advance() else self.accumulate
        hyperparams = self._standing({**self._optim_wrapper.hyperparams, **scalars})
        before, compiles = time.switch("step"), COMPILES.count
        in_flight.wait()
        new, outputs = self._compiled[step](state, batch, hyperparams)
        if COMPILES.count != compiles:
            time.was("compile")
            step.look(state, batch, hyperparams)
        in_flight.add(outputs["loss"])
        time.switch(before)
        return new, outputs


def _put(device: jax.Device | None, value: Any) -> jax.Array:
    """Sends a number to `device`, None for the default one, without tying it there."""
    with jax.default_device(device):
        return jnp.asarray(value)
