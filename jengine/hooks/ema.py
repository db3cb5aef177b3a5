"""Average the parameters inside the training step, for evaluation and deployment."""

import inspect
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jengine.annotations import Index
from jengine.averaging import AVERAGES, Average, AverageState
from jengine.errors import ConfigError, closest
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS
from jengine.train import StepContext

PyTree = Any


class EMAHookState(NamedTuple):
    """Hold the hook's part of the training state."""

    params: PyTree  # the averages, like the parameters; floats at least float32
    model_state: PyTree  # the averages of the model's state; None unless it is averaged
    steps: jax.Array  # int32[], updates of the average


@HOOKS.register_module()
class EMAHook(Hook):
    """Average the parameters; validation, test and deployment use the averages instead of the raw ones.

    The average is part of the compiled step and of the training state. Evaluation reads it, nothing is swapped, and the
    training itself has the same bits with and without the hook. Before the average begins it is a plain copy.

    In a checkpoint the averages replace the parameters, ready to be deployed, and the raw parameters are stored in
    `hook_state.EMAHook`. A resumed run restores both, bit for bit; `load_from` starts both from the averages.

    Args:
      ema_type: the kind of average: a name in `jengine.averaging`, or a class derived from `Average`.
      strict_load: raise when resuming from a checkpoint without an average. By default the average then starts from the
        weights, with a warning.
      begin_iter: the first iteration, as a count, that is averaged; 0 and 1 are the first of the run.
      begin_epoch: likewise in epochs; set one of the two.
      start_iters: another name for `begin_iter`.
      update_buffers: average the floating part of the model's state (batch statistics) too, instead of taking the
        newest.
      evaluate_on_ema: whether validation and test use the averages.
      evaluate_on_origin: whether they use the raw parameters: with `evaluate_on_ema` in a second pass whose metrics
        end in `_origin`.
      count_by: iterations that update the average under gradient accumulation: 'iter', every one, as in MMEngine;
        'update', only those that update the parameters; the others then cost as little as without the hook.
      **kwargs: for the average: `momentum`, `interval`, `gamma`, …

    Raises:
      AssertionError: a negative begin, or both `begin_iter` and `begin_epoch`. ConfigError: both `begin_iter` and
        `start_iters`, or an unknown `count_by`. KeyError: an unknown `ema_type`. TypeError: an unknown argument, or a
        begin that is not an integer.
    """

    priority = "NORMAL"

    def __init__(
        self,
        ema_type: str | type[Average] = "ExponentialMovingAverage",
        strict_load: bool = False,
        begin_iter: Index = 0,
        begin_epoch: Index = 0,
        start_iters: Index | None = None,
        update_buffers: bool = False,
        evaluate_on_ema: bool = True,
        evaluate_on_origin: bool = False,
        count_by: Literal["iter", "update"] = "iter",
        **kwargs: Any,
    ) -> None:
        if start_iters is not None:
            if begin_iter:
                raise ConfigError(
                    f"EMAHook: start_iters is another name for begin_iter; got both, {start_iters} and {begin_iter}"
                )
            begin_iter = start_iters
        if begin_iter and begin_epoch:
            raise AssertionError(
                f"EMAHook: set begin_iter or begin_epoch, not both; got {begin_iter} and {begin_epoch}"
            )
        self.strict_load = strict_load
        self.begin_iter = begin_iter
        self.begin_epoch = begin_epoch
        self.update_buffers = update_buffers
        self.evaluate_on_ema = evaluate_on_ema
        self.evaluate_on_origin = evaluate_on_origin
        self.count_by = count_by
        # Both are set by `before_train`, before the trace that freezes them.
        self.average = _build_average(ema_type, kwargs)
        self._first_iter = begin_iter

    # --- In the step. ---

    def init_traced_state(self, params: PyTree, model_state: PyTree) -> EMAHookState:
        """Return the average before the first iteration: a copy."""
        tracked, steps = self.average.init((params, model_state if self.update_buffers else None))
        return EMAHookState(params=tracked[0], model_state=tracked[1], steps=steps)

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Update the average."""
        own = ctx.hook_state

        def counted(steps: jax.Array) -> jax.Array:
            """Return the number of updates that count: 0 before the average begins, which makes an update a copy."""
            return jnp.where(ctx.step + 1 >= self._first_iter, steps, 0) if self._first_iter > 1 else steps

        before = AverageState((own.params, own.model_state), counted(own.steps))
        tracked, steps = self.average.update(before, (ctx.params, ctx.model_state if self.update_buffers else None))
        moved = EMAHookState(params=tracked[0], model_state=tracked[1], steps=counted(steps))
        return ctx.replace(hook_state=moved)

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Update the average with the parameters, which have not changed, if every iteration counts."""
        return self.traced_update(ctx) if self.count_by == "iter" else ctx

    # --- On the host. ---

    def before_run(self, runner: Runner) -> None:
        """Raise for a second average and warn if nothing would be evaluated.

        Raises:
          ConfigError: the run has more than one EMAHook.
        """
        if sum(isinstance(hook, EMAHook) for hook in runner.hooks) > 1:
            raise ConfigError("a run must have at most one EMAHook: validation and checkpoints hold one average")
        if not (self.evaluate_on_ema or self.evaluate_on_origin):
            runner.logger.warning(
                "EMAHook: evaluate_on_ema and evaluate_on_origin are both False; the raw parameters are evaluated"
            )

    def before_train(self, runner: Runner) -> None:
        """Compute, from the length of the run, when the average begins and how its weight falls.

        Raises:
          AssertionError: it would begin after the end.
        """
        for name, begin, end in (
            ("begin_iter", self.begin_iter, runner.max_iters),
            ("begin_epoch", self.begin_epoch, runner.max_epochs),
        ):
            if begin > end:
                raise AssertionError(
                    f"EMAHook: {name}={begin} must be before the end of training "
                    f"(max_{name.removeprefix('begin_')}s={end})"
                )
        if self.begin_epoch:
            self._first_iter = (self.begin_epoch - 1) * len(runner.train_loop.dataloader) + 1
        window = getattr(runner.optim_wrapper, "accumulative_counts", 1) if self.count_by == "update" else 1
        self.average = self.average.for_run(-(-runner.max_iters // window))

    def eval_variables(self, runner: Runner, variables: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
        """Replace the variables to evaluate by the averages, in the dtypes of the parameters."""
        # Where nothing was trained there is no average: the parameters of a checkpoint are averages already.
        own = _states(runner).get(type(self).__name__)
        if own is None or not self.evaluate_on_ema:
            return variables
        params, model_state = variables[""]
        averages = _cast(own.params, params), model_state
        if own.model_state is not None:
            averages = averages[0], _cast(own.model_state, model_state)
        origin = {"_origin": variables[""]} if self.evaluate_on_origin else {}
        return {**variables, "": averages, **origin}

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Swap the parameters and the averages, and record it under `exchanged`, which `resume` reads."""
        name, state = type(self).__name__, checkpoint["state"]
        own = state["hook_state"].get(name)
        if own is None:
            return
        items = [item for item in ("params", "model_state") if jax.tree.leaves(getattr(own, item))]
        raw = own._replace(**{item: state[item] for item in items})
        state.update({item: getattr(own, item) for item in items})
        state["hook_state"] = {**state["hook_state"], name: raw}
        checkpoint["exchanged"] = {item: f"hook_state.{name}.{item}" for item in items}

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Raise when resuming without an average, if `strict_load`.

        Raises:
          ValueError: there is none.
        """
        states = checkpoint["state"].get("hook_state")
        if self.strict_load and states is not None and type(self).__name__ not in states:
            raise ValueError(
                "the checkpoint holds no average, and EMAHook has strict_load=True; with strict_load=False the average "
                "starts from its weights"
            )


def _build_average(ema_type: str | type[Average], arguments: dict[str, Any]) -> Average:
    kind = AVERAGES.get(ema_type) if isinstance(ema_type, str) else ema_type
    if not (isinstance(kind, type) and issubclass(kind, Average)):
        hint = closest(str(ema_type), AVERAGES)
        raise TypeError(f"EMAHook: ema_type must be a kind of average, got {ema_type!r}{hint}")
    legal = inspect.signature(kind).parameters
    for name in arguments:
        if name not in legal:
            hook = [n for n, p in inspect.signature(EMAHook).parameters.items() if p.kind is not p.VAR_KEYWORD]
            raise TypeError(
                f"neither EMAHook nor {kind.__name__} has an argument {name!r}{closest(name, [*legal, *hook])}"
            )
    return kind(**arguments)


def _states(runner: Runner) -> dict[str, Any]:
    return {} if runner.state is None else runner.state.hook_state


def _cast(averages: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda a, x: a if a.dtype == x.dtype else a.astype(x.dtype), averages, like)
