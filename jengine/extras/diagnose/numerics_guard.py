"""Guard against training steps with non-finite or extreme values, inside the compiled step."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config.annotations import Count, Range
from jengine.config.errors import ConfigError
from jengine.config.paths import flatten
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.data.host_entries import select_arrays
from jengine.extras.diagnose.replay import write_dump
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.optim.transforms.fields import get_field
from jengine.optim.transforms.loss_scale import LossScaleState
from jengine.train.traced_hooks import StepContext, hook_names

PyTree = Any
_REASONS = (
    "",
    "the loss is not finite",
    "a gradient is not finite",
    "the loss spikes",
    "the gradient norm spikes",
)
# the fields of the state that the host reads
_HOST_FIELDS = ("dropped", "in_row", "last", "reason", "leaf")


class NumericsGuardState(NamedTuple):
    """The hook's entry in the training state."""

    dropped: jax.Array  # int32[], steps dropped so far
    in_row: jax.Array  # int32[], length of the last sequence of consecutive dropped steps
    last: jax.Array  # int32[], the last dropped step; -2 before the first
    reason: jax.Array  # int32[], why it was dropped: an index into `_REASONS`
    # int32[], index in the tree of the first parameter whose gradient was not finite; or -1
    leaf: jax.Array
    losses: jax.Array  # f32[window], of the last steps that were not dropped
    norms: jax.Array  # f32[window], gradient norms of the same steps
    seen: jax.Array  # int32[], steps that were not dropped


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class NumericsGuardHook(Hook):
    """Guard that drops steps with a non-finite or spiking loss or gradient, and ends training after
    too many in a row.

    A dropped step leaves parameters, optimizer, model state and other hooks unchanged, as if the
    batch did not exist; only the iteration number, and with it schedules, random keys and the data,
    advances. With gradient accumulation a dropped iteration is left out of the window's mean; if it
    would have updated, the window is discarded.

    The check is part of the compiled step. The host reads the result every `interval` iterations.
    After `max_in_row` dropped steps all further steps are dropped, so that the result does not
    depend on when the host reads. It then writes the arguments of the step that exceeded the limit
    to a file, for `jengine replay`, and every process raises FloatingPointError.

    With a loss scale (`AmpOptimWrapper`) the scale handles overflowing gradients: it skips the
    update and backs off. The loss is checked as usual.

    Args:
      max_in_row: number of dropped steps in a row after which training ends; None for never.
      spike_factor: a loss or gradient norm above this many times the median of the last `window`
        steps is a spike; None checks only for non-finite values.
      window: number of steps in the median; spikes are detected after that many steps.
      interval: iterations between two reads by the host. The batches in between are kept in memory.

    Attributes:
      failed_step: state, batch and hyperparameters of the step that ended training, and whether it
        would have updated.
    """

    priority = "HIGHEST"
    acts_on = "hyperparams"
    update_on_skipped_steps = True

    max_in_row: Count | None = 3
    spike_factor: Annotated[float, Range(gt=1)] | None = None
    window: Count = 50
    interval: Count = 10

    def __post_init__(self) -> None:
        # iteration, batch, hyperparams, is_update
        self._recent: list[tuple[int, Any, Mapping[str, Any], bool]] = []
        self._num_reported = 0  # dropped steps that were logged
        self.failed_step: tuple[Any, Any, Mapping[str, Any], bool] | None = None

    # --- In the step. ---

    def init_traced_state(self, params: PyTree, model_state: PyTree) -> NumericsGuardState:
        """Return the state before the first step."""

        def scalar(value: int = 0) -> jax.Array:
            return jnp.full((), value, jnp.int32)

        return NumericsGuardState(
            dropped=scalar(),
            in_row=scalar(),
            last=scalar(-2),
            reason=scalar(),
            leaf=scalar(-1),
            losses=jnp.zeros(self.window, jnp.float32),
            norms=jnp.zeros(self.window, jnp.float32),
            seen=scalar(),
        )

    def traced_grads(self, ctx: StepContext) -> StepContext:
        """Check the loss and the gradients, before other hooks change them."""
        state: NumericsGuardState = ctx.hook_state
        opt_states = (
            ctx.opt_state.values() if isinstance(ctx.opt_state, Mapping) else [ctx.opt_state]
        )
        found = [get_field(opt_state, LossScaleState, "loss_scale") for opt_state in opt_states]
        scales: list[jax.Array] = [scale for scale in found if scale is not None]
        squared_norm, leaf = _check_gradients(ctx)
        norm = jnp.sqrt(squared_norm) / (scales[0] if len(scales) == 1 else 1.0)
        losses = [_mean(value, ctx) for name, value in ctx.metrics.items() if "loss" in name]
        losses = losses or [jnp.zeros(())]  # gradients that a model's own step has without a loss
        loss = _mean(ctx.metrics["loss"], ctx) if "loss" in ctx.metrics else losses[0]
        failures = jnp.stack(
            [
                jnp.any(~jnp.isfinite(jnp.stack(losses))),
                jnp.zeros((), bool) if scales else leaf >= 0,
                self._is_spike(loss, state.losses, state.seen),
                self._is_spike(norm, state.norms, state.seen),
            ]
        )
        ended = jnp.zeros((), bool) if self.max_in_row is None else state.in_row >= self.max_in_row
        drop = failures.any() | ended
        # a step dropped because training has ended keeps the reason of the last step before
        reason = jnp.where(ended, state.reason, jnp.argmax(failures).astype(jnp.int32) + 1)
        leaf = jnp.where(ended, state.leaf, -1 if scales else leaf)
        state = _count_dropped(state, ctx.step, drop, reason, leaf)
        state = _add_to_history(state, ~drop & jnp.isfinite(norm), loss, norm)
        apply_update = ~drop if ctx.apply_update is None else ctx.apply_update & ~drop
        metrics = {**ctx.metrics, "dropped_steps": state.dropped.astype(jnp.float32)}
        return ctx.replace(hook_state=state, apply_update=apply_update, metrics=metrics)

    def _is_spike(self, value: jax.Array, history: jax.Array, seen: jax.Array) -> jax.Array:
        if self.spike_factor is None:
            return jnp.zeros((), bool)
        median = jnp.median(history)
        return (seen >= self.window) & (value - median > (self.spike_factor - 1) * jnp.abs(median))

    # --- On the host. ---

    def before_train(self, runner: RunnerProtocol) -> None:
        """Read the number of steps dropped before a restart."""
        if isinstance(runner.optim_wrapper, Mapping) and self.spike_factor is not None:
            raise ConfigError(
                "NumericsGuardHook: spike_factor must be None in a run with several optimizers"
            )
        self._recent.clear()
        self.failed_step = None
        self._num_reported = 0 if runner.state.is_abstract else int(self._get_state(runner).dropped)

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Keep the batch, and read the results every `interval` iterations."""
        wrapper = runner.optim_wrapper
        hyperparams = {**wrapper.hyperparams, **runner.hyperparams}
        is_update = isinstance(wrapper, Mapping) or wrapper.should_update()
        # The dump needs the step that failed, which the host learns only later
        self._recent.append((runner.iter, data_batch, hyperparams, is_update))
        if self.every_n_train_iters(runner, self.interval) or self.is_last_train_iter(runner):
            self._read_results(runner)

    def before_save_checkpoint(self, runner: RunnerProtocol, checkpoint: dict[str, Any]) -> None:
        """Read the results, so that no checkpoint is written after the step that ends training."""
        self._read_results(runner)

    def _read_results(self, runner: RunnerProtocol) -> None:
        """Log the steps dropped since the last read; end training after too many in a row."""
        state = self._get_state(runner)
        state = state._replace(
            **jax.device_get({name: getattr(state, name) for name in _HOST_FIELDS})
        )
        done = int(runner.state.step)  # a chunk's steps are kept before they run
        recent = [entry for entry in self._recent if entry[0] < done]
        self._recent = self._recent[len(recent) :]
        num_new = int(state.dropped) - self._num_reported
        self._num_reported = int(state.dropped)
        if not num_new:
            return
        reason = _REASONS[state.reason]
        if state.leaf >= 0:
            paths = list(flatten(runner.state.params))
            reason += f"; the first non-finite gradient is that of {paths[state.leaf]!r}"
        if self.max_in_row is None or state.in_row < self.max_in_row:
            runner.logger.warning(
                f"NumericsGuardHook: {num_new} of the last {len(recent)} steps were dropped, "
                f"{self._num_reported} in total; the last one was iteration {state.last}: {reason}"
            )
            return
        first = int(state.last) - int(state.in_row) + 1
        last = first + self.max_in_row - 1
        name = f"numerics_iter_{last}.dump"
        _, batch, hyperparams, is_update = next(entry for entry in recent if entry[0] == last)
        batch = select_arrays(batch)
        if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch)):
            # hooks receive the batch of a chunk on the host, with the examples of this process only
            batch = runner.strategy.put_batch(batch, rules=runner.train_dataloader.batch_rules)
        # dropped steps change only the number
        train_state = runner.state.replace(step=np.int32(last))
        write_dump(
            os.path.join(runner.local_dir, name),
            state=train_state,
            batch=batch,
            hyperparams=hyperparams,
            update=is_update,
        )
        self.failed_step = train_state, batch, hyperparams, is_update
        raise FloatingPointError(
            f"NumericsGuardHook: the steps of iterations {first} to {last} were dropped: "
            f"{reason}. Parameters and optimizer are those before iteration {first}. To rerun the "
            f"step of iteration {last} and find the first operation with a non-finite result:\n"
            f"  jengine replay CONFIG {os.path.join(runner.work_dir, name)}"
        )

    def _get_state(self, runner: RunnerProtocol) -> NumericsGuardState:
        name = next(name for name, hook in hook_names(runner.hooks).items() if hook is self)
        return runner.state.hook_state[name]


def _check_gradients(ctx: StepContext) -> tuple[jax.Array, jax.Array]:
    """Return the squared norm of the gradients, f32[], and the index of the first non-finite
    one, int32[].
    """
    positions = {path: position for position, path in enumerate(flatten(ctx.params))}
    grads = flatten(ctx.grads)
    squares = _mean(
        jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in grads.values()]), ctx
    )
    bad = ~jnp.isfinite(squares)
    first = jnp.asarray([positions[path] for path in grads], jnp.int32)[jnp.argmax(bad)]
    return jnp.sum(squares), jnp.where(bad.any(), first, -1)


def _mean(value: jax.Array, ctx: StepContext) -> jax.Array:
    """Return the mean over replicas, so that all decide alike.

    Not finite if the value of any replica is not.
    """
    return value if ctx.axis_name is None else jax.lax.pmean(value, ctx.axis_name)


def _count_dropped(
    state: NumericsGuardState, step: jax.Array, drop: jax.Array, reason: jax.Array, leaf: jax.Array
) -> NumericsGuardState:
    """Count a dropped step, once: each of several optimizers checks it."""
    is_new = drop & (state.last != step)
    in_row = jnp.where(state.last == step - 1, state.in_row + 1, 1)
    new = {"in_row": in_row, "last": step, "reason": reason, "leaf": leaf}
    changed = {name: jnp.where(is_new, value, getattr(state, name)) for name, value in new.items()}
    return state._replace(dropped=state.dropped + is_new, **changed)


def _add_to_history(
    state: NumericsGuardState, is_good: jax.Array, loss: jax.Array, norm: jax.Array
) -> NumericsGuardState:
    """Replace the oldest loss and norm by those of a good step."""
    size = state.losses.shape[0]
    # A ring in fixed arrays, since shapes in the state cannot grow; bad steps do not enter the
    # statistics that judge them.
    is_oldest = is_good & (jnp.arange(size) == state.seen % size)
    return state._replace(
        losses=jnp.where(is_oldest, loss, state.losses).astype(jnp.float32),
        norms=jnp.where(is_oldest, norm, state.norms).astype(jnp.float32),
        seen=state.seen + is_good,
    )
