"""Skip training steps with non-finite or extreme numbers, inside the compiled step."""

import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.annotations import Count, Range
from jengine.errors import ConfigError
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.optim.transforms import LossScaleState, get_field
from jengine.paths import flatten
from jengine.registry import HOOKS
from jengine.train import StepContext, hook_names
from jengine.train.replay import write_dump

PyTree = Any
_REASONS = ("", "the loss is not finite", "a gradient is not finite", "the loss spikes", "the gradient norm spikes")

_TOLD = ("dropped", "in_row", "last", "reason", "leaf")  # the numbers of the state that the host reads


class NumericsGuardState(NamedTuple):
    """Hold the hook's part of the training state."""

    dropped: jax.Array  # int32[], steps dropped so far
    in_row: jax.Array  # int32[], length of the last run of consecutive dropped steps
    last: jax.Array  # int32[], number of the last one; -2 before the first
    reason: jax.Array  # int32[], why it was dropped: an index into `_REASONS`
    leaf: jax.Array  # int32[], index in the tree of the first parameter whose gradient was not finite; or -1
    losses: jax.Array  # f32[window], of the last steps that were not dropped
    norms: jax.Array  # f32[window], their gradient norms
    seen: jax.Array  # int32[], steps that were not dropped


@HOOKS.register_module()
class NumericsGuardHook(Hook):
    """Drop the steps whose loss or gradients are not finite, or spike, and end training after too many in a row.

    A dropped step leaves parameters, optimizer, model state and the states of other hooks unchanged, as if its batch
    did not exist; only the iteration number, and with it schedules, random keys and the data, advances. With
    gradient accumulation a dropped iteration adds nothing; where it was to update, its window is discarded.

    The check is part of the compiled step. The host reads the result every `interval` iterations: until then steps past
    `max_in_row` dropped ones are dropped too, so that nothing depends on when it reads. It then writes the arguments of
    the step that exceeded the limit to a file, from which `jengine replay` runs it again, and every process raises.

    Under a loss scale (`AmpOptimWrapper`) gradients that overflow are left to the scale, which skips the update and
    backs off; the loss is checked as usual.

    Args:
      max_in_row: dropped steps in a row after which training ends; None never ends it.
      spike_factor: a loss or gradient norm of more than this many times the median of the last `window` is a spike;
        None checks only for non-finite values.
      window: number of steps of the median; before that many steps nothing is a spike.
      interval: iterations from one read of the host to the next. The batches in between are kept in memory.

    Raises:
      FloatingPointError: from the hook, `max_in_row` steps in a row were dropped.
      ConfigError: a setting outside its range.
    """

    priority = "HIGHEST"
    runs_ahead = True
    update_on_skipped_steps = True

    def __init__(
        self,
        max_in_row: Count | None = 3,
        spike_factor: Annotated[float, Range(gt=1)] | None = None,
        window: Count = 50,
        interval: Count = 10,
    ) -> None:
        self.max_in_row = max_in_row
        self.spike_factor = spike_factor
        self.window = window
        self.interval = interval
        self._axis: str | None = None  # set by `before_train`, before the trace that freezes it
        self._recent: list[tuple[int, Any, Mapping[str, Any], bool]] = []  # iteration, batch, hyperparams, is_update
        self._told = 0

    # --- In the step. ---

    def init_traced_state(self, params: PyTree, model_state: PyTree) -> NumericsGuardState:
        """Return the state with nothing dropped and nothing seen."""

        def number(value: int = 0) -> jax.Array:
            return jnp.full((), value, jnp.int32)

        return NumericsGuardState(
            dropped=number(), in_row=number(), last=number(-2), reason=number(), leaf=number(-1),
            losses=jnp.zeros(self.window, jnp.float32), norms=jnp.zeros(self.window, jnp.float32), seen=number(),
        )  # fmt: skip

    def traced_grads(self, ctx: StepContext) -> StepContext:
        """Check the loss and the gradients, before other hooks change them."""
        own: NumericsGuardState = ctx.hook_state
        scales = _loss_scales(ctx.opt_state)
        squares, leaf = self._gradients(ctx)
        norm = jnp.sqrt(squares) / (scales[0] if len(scales) == 1 else 1.0)
        losses = [self._mean(value) for name, value in ctx.metrics.items() if "loss" in name]
        loss = self._mean(ctx.metrics["loss"]) if "loss" in ctx.metrics else losses[0]
        wrong = [
            jnp.any(~jnp.isfinite(jnp.stack(losses))),
            jnp.zeros((), bool) if scales else leaf >= 0,
            self._spikes(loss, own.losses, own.seen),
            self._spikes(norm, own.norms, own.seen),
        ]
        ended = jnp.zeros((), bool) if self.max_in_row is None else own.in_row >= self.max_in_row
        bad = jnp.stack(wrong)
        drop = bad.any() | ended
        # a step dropped because training has ended has no reason of its own
        reason = jnp.where(ended, own.reason, jnp.argmax(bad).astype(jnp.int32) + 1)
        leaf = jnp.where(ended, own.leaf, -1 if scales else leaf)
        moved = _counted(own, ctx.step, drop, reason, leaf)
        moved = _remembered(moved, ~drop & jnp.isfinite(norm), loss, norm)
        accept = ~drop if ctx.apply_update is None else ctx.apply_update & ~drop
        metrics = {**ctx.metrics, "dropped_steps": moved.dropped.astype(jnp.float32)}
        return ctx.replace(hook_state=moved, apply_update=accept, metrics=metrics)

    def _gradients(self, ctx: StepContext) -> tuple[jax.Array, jax.Array]:
        """Return the squared norm of the gradients, f32[], and the index of the first non-finite one, int32[]."""
        places = {path: place for place, path in enumerate(flatten(ctx.params))}
        grads = flatten(ctx.grads)
        squares = self._mean(jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in grads.values()]))
        bad = ~jnp.isfinite(squares)
        first = jnp.asarray([places[path] for path in grads], jnp.int32)[jnp.argmax(bad)]
        return jnp.sum(squares), jnp.where(bad.any(), first, -1)

    def _mean(self, value: jax.Array) -> jax.Array:
        """Return the mean over the replicas, so that all decide alike; not finite if that of any replica is not."""
        return value if self._axis is None else jax.lax.pmean(value, self._axis)

    def _spikes(self, value: jax.Array, before: jax.Array, seen: jax.Array) -> jax.Array:
        if self.spike_factor is None:
            return jnp.zeros((), bool)
        usual = jnp.median(before)
        return (seen >= self.window) & (value - usual > (self.spike_factor - 1) * jnp.abs(usual))

    # --- On the host. ---

    def before_train(self, runner: Runner) -> None:
        """Record the replicas, and the steps that were dropped before a restart.

        Raises:
          ConfigError: `spike_factor` with several optimizers.
        """
        wrapper = runner.optim_wrapper
        if isinstance(wrapper, Mapping) and self.spike_factor is not None:
            raise ConfigError("NumericsGuardHook: spike_factor must be None in a run with several optimizers")
        self._axis = getattr(wrapper, "axis_name", None)
        self._recent.clear()
        self._told = int(self._own(runner).dropped)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Keep the batch, and read the results every `interval` iterations."""
        wrapper = runner.optim_wrapper
        numbers = {**wrapper.hyperparams, **runner.hyperparams}
        updates = isinstance(wrapper, Mapping) or wrapper.should_update()
        self._recent.append((runner.iter, data_batch, numbers, updates))
        if self.every_n_train_iters(runner, self.interval) or self.is_last_train_iter(runner):
            self._look(runner)

    def next_step(self, runner: Runner, step: int) -> float:
        """Return the next step after which the host checks."""
        last = runner.max_iters - 1
        return min(self.next_multiple(self.interval, step), last if last >= step else math.inf)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Read the results, so that no checkpoint holds a state in which training has ended."""
        self._look(runner)

    def _look(self, runner: Runner) -> None:
        """Log the steps dropped since the last read, and end training if there were too many in a row."""
        own = self._own(runner)
        found = own._replace(**jax.device_get({name: getattr(own, name) for name in _TOLD}))
        recent, self._recent = self._recent, []
        new, self._told = int(found.dropped) - self._told, int(found.dropped)
        if not new:
            return
        why = _REASONS[found.reason]
        if found.leaf >= 0:
            paths = list(flatten(runner.state.params))
            why += f"; the first gradient that is not finite is that of {paths[found.leaf]!r}"
        if self.max_in_row is None or found.in_row < self.max_in_row:
            runner.logger.warning(
                f"NumericsGuardHook: {new} of the last {len(recent)} steps were dropped, {self._told} in all; "
                f"the last was that of iteration {found.last}: {why}"
            )
            return
        first = int(found.last) - int(found.in_row) + 1
        last = first + self.max_in_row - 1
        path = os.path.join(runner.work_dir, f"numerics_iter_{last}.dump")
        _, batch, numbers, updates = next(entry for entry in recent if entry[0] == last)
        if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch)):
            # the batch of a chunk reaches hooks as this process has read it, with its own rows only
            batch = runner.strategy.put_batch(batch)
        state = runner.state.replace(step=np.int32(last))
        write_dump(path, state=state, batch=batch, hyperparams=numbers, update=updates)
        raise FloatingPointError(
            f"NumericsGuardHook: the steps of the iterations {first} to {last} were dropped: {why}. Parameters and "
            f"optimizer are those before iteration {first}. To run the step of iteration {last} again and find where "
            f"its numbers go wrong:\n  jengine replay CONFIG {path}"
        )

    def _own(self, runner: Runner) -> NumericsGuardState:
        name = next(name for name, hook in hook_names(runner.hooks).items() if hook is self)
        return runner.state.hook_state[name]


def _counted(
    own: NumericsGuardState, step: jax.Array, drop: jax.Array, reason: jax.Array, leaf: jax.Array
) -> NumericsGuardState:
    """Return the state with this step counted, once, if it is dropped; several optimizers check it several times."""
    new = drop & (own.last != step)
    row = jnp.where(own.last == step - 1, own.in_row + 1, 1)
    return own._replace(
        dropped=own.dropped + new,
        in_row=jnp.where(new, row, own.in_row),
        last=jnp.where(new, step, own.last),
        reason=jnp.where(new, reason, own.reason),
        leaf=jnp.where(new, leaf, own.leaf),
    )


def _remembered(own: NumericsGuardState, good: jax.Array, loss: jax.Array, norm: jax.Array) -> NumericsGuardState:
    """Return the state with the oldest loss and norm replaced by those of a step that is not dropped."""
    here = good & (jnp.arange(own.losses.shape[0]) == own.seen % own.losses.shape[0])
    return own._replace(
        losses=jnp.where(here, loss, own.losses), norms=jnp.where(here, norm, own.norms), seen=own.seen + good
    )


def _loss_scales(opt_state: PyTree) -> list[jax.Array]:
    """Return the loss scales of the optimizers that have one, f32[] each."""
    states = opt_state.values() if isinstance(opt_state, Mapping) else [opt_state]
    found = [get_field(state, LossScaleState, "loss_scale") for state in states]
    return [scale for scale in found if scale is not None]
