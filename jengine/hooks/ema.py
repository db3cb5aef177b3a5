"""Averaged parameters, computed inside the training step, for evaluation and deployment."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jengine.config.annotations import Index
from jengine.config.errors import ArgumentError, ConfigError, closest
from jengine.config.registry import HOOKS
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.train.average import AVERAGES, Average, AverageState
from jengine.train.traced_hooks import StepContext

PyTree = Any


class EMAHookState(NamedTuple):
    """The hook's entry in the training state."""

    params: PyTree  # averages, like the parameters; floats at least float32
    model_state: PyTree  # averages of the model state; None without update_buffers
    steps: jax.Array  # int32[], updates of the average
    # further averages by name, each with a state like this one
    others: dict[str, Any] | None = None


@HOOKS.register_module()
class EMAHook(Hook):
    """Averaged parameters, which validation, test and deployment use instead of the raw ones.

    The average is computed in the compiled step and is part of the training state. Evaluation reads
    it without swapping parameters, and training is bit-identical with and without the hook. Before
    averaging begins it is a plain copy.

    In a checkpoint the averages replace the parameters, ready for deployment, and the raw
    parameters are stored in `hook_state.EMAHook`. A resumed run restores both, bit for bit;
    `load_from` starts both from the averages.

    Args:
      ema_type: the average: a name in `jengine.train`, or a subclass of `Average`.
      strict_load: True raises when resuming from a checkpoint without an average; otherwise the
        average starts from the weights, with a warning. False also lets `load_from` keep the
        model's own values where nothing matches.
      begin_iter: the first iteration to average, counted from 1; 0 is the same as 1.
      begin_epoch: the first epoch to average, counted from 1; set one of the two.
      start_iters: another name for `begin_iter`.
      update_buffers: also average the floating-point model state (batch statistics), instead of
        using the latest.
      evaluate_on_ema: whether validation and test use the averages.
      evaluate_on_origin: whether they use the raw parameters; with `evaluate_on_ema`, in a second
        pass whose metrics end in `_origin`.
      count_by: which iterations update the average under gradient accumulation: 'iter' for all, as
        in MMEngine; 'update' for those that update the parameters, so that the others cost nothing
        extra. Updates that a loss scale skips (`AmpOptimWrapper`) do not count.
      before_update: average the parameters as they were before the iteration's update, one update
        behind, as JAX ports of DiT do (the original averages them after it).
      others: further averages by name, each with its arguments and maybe an `ema_type`:
        `dict(fast=dict(momentum=0.01))`. Each is evaluated in a pass of its own, whose metrics end
        in `_fast`, and is stored in `hook_state.EMAHook.others.fast`.
      **kwargs: arguments of the average: `momentum`, `interval`, `gamma`, …

    Raises:
      ArgumentError: a negative begin, or both `begin_iter` and `begin_epoch`. ConfigError: both
        `begin_iter` and `start_iters`. KeyError: an unknown `ema_type`. TypeError: an unknown
        argument, or a begin that is no integer.

    Examples:
      >>> EMAHook(momentum=0.001, begin_epoch=5).average.interval
      1
    """

    is_single = True  # evaluation uses one average

    def __init__(
        self,
        ema_type: str | type[Average] = "ExponentialMovingAverage",
        strict_load: bool | None = None,
        begin_iter: Index = 0,
        begin_epoch: Index = 0,
        start_iters: Index | None = None,
        update_buffers: bool = False,
        evaluate_on_ema: bool = True,
        evaluate_on_origin: bool = False,
        count_by: Literal["iter", "update"] = "iter",
        before_update: bool = False,
        others: Mapping[str, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if start_iters is not None:
            if begin_iter:
                raise ConfigError(
                    "EMAHook: one of start_iters and begin_iter, its other name, must be left "
                    f"out, got {start_iters} and {begin_iter}"
                )
            begin_iter = start_iters
        if begin_iter and begin_epoch:
            raise ArgumentError(
                f"EMAHook: one of begin_iter and begin_epoch must be 0, got {begin_iter} and "
                f"{begin_epoch}"
            )
        self.strict_load = strict_load
        self.begin_iter = begin_iter
        self.begin_epoch = begin_epoch
        self.update_buffers = update_buffers
        self.evaluate_on_ema = evaluate_on_ema
        self.evaluate_on_origin = evaluate_on_origin
        self.count_by = count_by
        self.before_update = before_update
        # `before_train` sets both before the trace that freezes them.
        self.average = _build_average(ema_type, kwargs)
        self.others = {
            name: _build_other(name, dict(arguments)) for name, arguments in (others or {}).items()
        }
        self._first_iter = begin_iter

    # --- In the step. ---

    def init_traced_state(self, params: PyTree, model_state: PyTree) -> EMAHookState:
        """Return a copy of the parameters as the initial value of each average."""

        def init(average: Average) -> EMAHookState:
            tracked, steps = average.init((params, model_state if self.update_buffers else None))
            return EMAHookState(params=tracked[0], model_state=tracked[1], steps=steps)

        others = {name: init(average) for name, average in self.others.items()}
        return init(self.average)._replace(others=others or None)

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Update the averages."""
        state: EMAHookState = ctx.hook_state
        new_state = self._move(self.average, state, ctx)
        others = {
            name: self._move(self.others[name], other, ctx)
            for name, other in (state.others or {}).items()
        }
        new_state = new_state._replace(others=others or None)
        # a loss scale may have skipped it
        if self.count_by == "update" and (is_updated := ctx.is_updated) is not None:
            new_state = jax.tree.map(
                lambda new, old: jnp.where(is_updated, new, old), new_state, state
            )
        return ctx.replace(hook_state=new_state)

    def _move(self, average: Average, state: EMAHookState, ctx: StepContext) -> EMAHookState:
        """Return the state of one average after an update."""

        def count_updates(steps: jax.Array) -> jax.Array:
            """Return `steps`, or 0 before averaging begins, which makes an update a copy."""
            return (
                jnp.where(ctx.step + 1 >= self._first_iter, steps, 0)
                if self._first_iter > 1
                else steps
            )

        before = AverageState((state.params, state.model_state), count_updates(state.steps))
        params = ctx.old_params if self.before_update else ctx.params
        tracked, steps = average.update(
            before, (params, ctx.model_state if self.update_buffers else None)
        )
        return EMAHookState(params=tracked[0], model_state=tracked[1], steps=count_updates(steps))

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Update the average with the unchanged parameters if every iteration counts."""
        return self.traced_update(ctx) if self.count_by == "iter" else ctx

    # --- On the host. ---

    def before_run(self, runner: RunnerProtocol) -> None:
        """Warn if neither evaluation is enabled."""
        if not (self.evaluate_on_ema or self.evaluate_on_origin):
            runner.logger.warning(
                "EMAHook: evaluate_on_ema and evaluate_on_origin are both False; the raw "
                "parameters are evaluated"
            )

    def before_train(self, runner: RunnerProtocol) -> None:
        """Set the first iteration to average, and the run length for averages that depend on it.

        Raises:
          ArgumentError: averaging would begin after the end of training, or the average would never
            move.
        """
        for name, begin, end in (
            ("begin_iter", self.begin_iter, runner.max_iters),
            ("begin_epoch", self.begin_epoch, runner.max_epochs),
        ):
            if begin > end:
                raise ArgumentError(
                    f"EMAHook: {name} must be at most max_{name.removeprefix('begin_')}s={end}, "
                    f"got {begin}"
                )
        if self.begin_epoch:
            self._first_iter = (self.begin_epoch - 1) * self.require_epoch_length(runner) + 1
        wrapper = runner.optim_wrapper
        max_iters = runner.max_iters
        count: Callable[[int], int] = int
        # several optimizers do not accumulate
        if self.count_by == "update" and not isinstance(wrapper, Mapping):
            count = wrapper.count_updates
        if math.isfinite(max_iters):
            updates = count(int(max_iters)) - count(max(self._first_iter, 1) - 1)
            if 1 < updates <= self.average.interval:
                raise ArgumentError(
                    f"`EMAHook.interval` must be below {updates}, the number of updates in the "
                    "run, got "
                    f"{self.average.interval}: the average would stay at the first weights"
                )
            total = count(int(max_iters))
            self.average = self.average.with_total_steps(total)
            self.others = {
                name: average.with_total_steps(total) for name, average in self.others.items()
            }

    def eval_variables(
        self, runner: RunnerProtocol, variables: dict[str, tuple[Any, Any]]
    ) -> dict[str, tuple[Any, Any]]:
        """Replace the parameters by the averages, in the dtypes of the parameters."""
        # Without training there is no average: the parameters of a checkpoint are averages already.
        state = None if runner.state is None else runner.state.hook_state.get(type(self).__name__)
        if state is None or not self.evaluate_on_ema:
            return variables
        others = {
            f"_{name}": cast_average(other, *variables[""])
            for name, other in (state.others or {}).items()
        }
        origin = {"_origin": variables[""]} if self.evaluate_on_origin else {}
        return {**variables, "": cast_average(state, *variables[""]), **others, **origin}

    def before_save_checkpoint(self, runner: RunnerProtocol, checkpoint: dict[str, Any]) -> None:
        """Swap parameters and averages, and record it under `exchanged`, which `resume` reads.

        If evaluation uses the raw parameters, record where they are under `evaluated` too.
        """
        name = type(self).__name__
        state = checkpoint["state"]
        average = state["hook_state"].get(name)
        if average is None:
            return
        items = [
            item for item in ("params", "model_state") if jax.tree.leaves(getattr(average, item))
        ]
        raw = average._replace(**{item: state[item] for item in items})
        state.update({item: getattr(average, item) for item in items})
        # A new dict: the old one is part of the training state
        state["hook_state"] = {**state["hook_state"], name: raw}
        checkpoint["exchanged"] = {item: f"hook_state.{name}.{item}" for item in items}
        if not self.evaluate_on_ema:
            checkpoint["evaluated"] = checkpoint["exchanged"]

    def after_load_checkpoint(self, runner: RunnerProtocol, checkpoint: dict[str, Any]) -> None:
        """With `strict_load`, raise ValueError if the checkpoint of a resumed run has no
        average.
        """
        states = checkpoint["state"].get("hook_state")
        if self.strict_load and states is not None and type(self).__name__ not in states:
            raise ValueError(
                "EMAHook: the checkpoint must have an average with strict_load=True, got one "
                "without; with strict_load=False the average starts from its weights"
            )


def _build_average(ema_type: str | type[Average], arguments: dict[str, Any]) -> Average:
    kind = AVERAGES.get(ema_type) if isinstance(ema_type, str) else ema_type
    if not (isinstance(kind, type) and issubclass(kind, Average)):
        hint = closest(str(ema_type), AVERAGES)
        raise TypeError(f"EMAHook: ema_type must be an average, got {ema_type!r}{hint}")
    return kind(**arguments)


def _build_other(name: str, arguments: dict[str, Any]) -> Average:
    if not name.isidentifier() or name == "origin":
        raise ConfigError(
            f"EMAHook: a name in `others` must be a Python name other than 'origin', got {name!r}"
        )
    return _build_average(arguments.pop("ema_type", "ExponentialMovingAverage"), arguments)


def cast_average(state: Any, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Return an average, `state.params` and `state.model_state`, in the dtypes of the model.

    The latest model state replaces that of the average if it is None, which is not averaged then.
    """

    def cast(averages: PyTree, like: PyTree) -> PyTree:
        return jax.tree.map(
            lambda a, x: a if a.dtype == x.dtype else a.astype(x.dtype), averages, like
        )

    averaged_state = (
        model_state if state.model_state is None else cast(state.model_state, model_state)
    )
    return cast(state.params, params), averaged_state
