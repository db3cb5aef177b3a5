"""The training step and the evaluation step: pure functions, for the caller to compile."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.errors import closest
from jengine.model import CastModel, Precision
from jengine.train.context import StepContext
from jengine.train.losses import loss_weight, mean_over_replicas, total_loss
from jengine.train.state import TrainState, strongly_typed
from jengine.train.traced_hooks import TracedHooks

if TYPE_CHECKING:
    from jengine.model import Model
    from jengine.optim import OptimWrapper, OptimWrapperDict

PyTree = Any
Outputs = dict[str, jax.Array]
TrainStep = Callable[[TrainState, PyTree, Mapping[str, Any]], tuple[TrainState, Outputs]]
EvalStep = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class Phase(NamedTuple):
    """A part of the training step: one optimizer and the loss that it minimises."""

    name: str  # '' when there is one optimizer alone
    optim_wrapper: "OptimWrapper"
    loss: Callable[..., Any]  # (params, model_state, batch, *, rng, hyperparams) -> (losses, model_state)


def build_train_step(
    model: "Model",
    optim_wrapper: "OptimWrapper | OptimWrapperDict",
    hooks: Sequence[Any] = (),
    *,
    update: bool = True,
    phases: Sequence[tuple[str, int]] | None = None,
) -> TrainStep:
    """Builds `step(state, batch, hyperparams) -> (state, outputs)`.

    The step is pure and not compiled: `jax.jit(step, donate_argnums=0)` is what the Runner does with it. Whatever
    changes from one iteration to the next comes in through the arguments, so it is traced once.

    Args:
      model: gives the losses.
      optim_wrapper: turns gradients into updates; several by name for a model with `phase_loss`.
      hooks: their traced points are compiled in, in this order.
      update: False builds the step of an iteration that only accumulates gradients (see `accumulative_counts`): the
        optimizer is left out, and `traced_accumulate` takes the place of `traced_update`.
      phases: with several optimizers, which act in one step, in order, and how often: `[('disc', 2), ('gen', 1)]`; by
        default each once. All see the same batch, each time with a key of its own.

    Returns:
      The step. Its outputs are scalars f32[] by name: 'loss' (the total), each loss of the model, 'grad_norm' where
      gradients are clipped by norm, and what hooks add. With phases, 'loss_<phase>' are their totals.

    Raises:
      ValueError: phases that name no optimizer, or phases for a single one.
    """
    traced = TracedHooks(hooks)
    parts = _plan(model, optim_wrapper, phases)

    def step(state: TrainState, batch: PyTree, hyperparams: Mapping[str, Any]) -> tuple[TrainState, Outputs]:
        """One iteration."""
        rng = jax.random.fold_in(state.rng, state.step)
        ctx = StepContext(
            step=state.step,
            rng=rng,
            batch=batch,
            hyperparams=hyperparams,
            params=state.params,
            model_state=state.model_state,
            opt_state=state.opt_state,
        )
        ctx, hook_state = traced.run("traced_batch", ctx, state.hook_state)
        for i, phase in enumerate(parts):
            model_state = ctx.model_state
            own_rng = jax.random.fold_in(rng, i) if phase.name else rng
            ctx = _differentiate(phase, ctx.replace(rng=own_rng), update=update)
            ctx, hook_state = traced.run("traced_grads", ctx, hook_state)
            if i + 1 < len(parts):
                ctx = _update(phase, ctx, model_state)

        def finish(ctx: StepContext, hook_state: Mapping[str, PyTree]) -> tuple[TrainState, Outputs]:
            ctx = _update(parts[-1], ctx, model_state) if update else _accumulate(parts[-1], ctx)
            ctx = ctx.replace(rng=rng, outputs=_with_total(ctx.outputs, parts))
            ctx, hook_state = traced.run("traced_update" if update else "traced_accumulate", ctx, hook_state)
            return _moved(state, ctx, hook_state), ctx.outputs

        if ctx.accept is None:
            return finish(ctx, hook_state)
        if (axis := parts[-1].optim_wrapper.axis_name) is not None:  # replicas must take the same branch
            ctx = ctx.replace(accept=jax.lax.pmin(ctx.accept.astype(jnp.int32), axis) > 0)
        left = _left(state, optim_wrapper if update else None, traced.after_a_drop(state.hook_state, hook_state))
        return _finish_if_accepted(finish, ctx, hook_state, left)

    return step


def _plan(model: "Model", optim_wrapper: Any, phases: Sequence[tuple[str, int]] | None) -> list[Phase]:
    """The phases of a step, each as often as it acts."""
    if not isinstance(optim_wrapper, Mapping):
        if phases is not None:
            raise ValueError(f"phases {list(phases)} are for several optimizers; there is one")
        return [Phase("", optim_wrapper, _under_amp(model, optim_wrapper).loss)]
    plan = []
    for name, times in [(name, 1) for name in optim_wrapper] if phases is None else phases:
        if name not in optim_wrapper:
            raise ValueError(f"no optimizer is called {name!r}, as phases have it{closest(name, optim_wrapper)}")
        if optim_wrapper[name].accumulative_counts > 1:
            raise ValueError(f"{name!r} accumulates gradients, which several optimizers in one step cannot do")
        loss = functools.partial(_under_amp(model, optim_wrapper[name]).phase_loss, name)
        plan += [Phase(name, optim_wrapper[name], loss)] * times
    return plan


def _under_amp(model: "Model", optim_wrapper: Any) -> "Model":
    """The model in the wrapper's compute dtype, if it has one: it then sees the batch in it too."""
    dtype = getattr(optim_wrapper, "dtype", None)
    return model if dtype is None else CastModel(model, Precision(compute=dtype))


def _differentiate(phase: Phase, ctx: StepContext, *, update: bool) -> StepContext:
    """Adds losses, new model state and gradients to the context."""
    wrapper = phase.optim_wrapper
    averaged = wrapper.accumulative_counts > 1 or wrapper.axis_name is not None

    def loss_fn(params: PyTree) -> tuple[jax.Array, tuple[Outputs, PyTree, jax.Array | None]]:
        losses, model_state = phase.loss(params, ctx.model_state, ctx.batch, rng=ctx.rng, hyperparams=ctx.hyperparams)
        total, outputs = total_loss(losses, ctx.batch)
        weight = loss_weight(losses, ctx.batch if wrapper.axis_name else None) if averaged else None
        return total, (outputs, model_state, weight)

    own = ctx.opt_state[phase.name] if phase.name else ctx.opt_state
    (_, (outputs, model_state, weight)), grads = wrapper.value_and_grad(loss_fn, has_aux=True)(ctx.params, own)
    if wrapper.axis_name is not None and update:  # what only accumulates exchanges nothing
        outputs = mean_over_replicas(outputs, weight, wrapper.axis_name)
    if phase.name:
        outputs = {f"loss_{phase.name}" if k == "loss" else k: v for k, v in outputs.items()}
    return ctx.replace(model_state=model_state, grads=grads, loss_weight=weight, outputs={**ctx.outputs, **outputs})


def _update(phase: Phase, ctx: StepContext, old_model_state: PyTree) -> StepContext:
    """Lets the phase's optimizer change the parameters."""
    name, wrapper = phase.name, phase.optim_wrapper
    own, numbers = (ctx.opt_state[name], ctx.hyperparams[name]) if name else (ctx.opt_state, ctx.hyperparams)
    params, own = wrapper.apply(ctx.grads, own, ctx.params, numbers, ctx.loss_weight)
    model_state = ctx.model_state
    if own.loss_scale is not None:  # an overflow leaves the model's state as it was, like everything else
        finite = own.loss_scale.finite
        model_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), model_state, old_model_state)
    metrics = {f"{key}_{name}" if name else key: value for key, value in own.metrics.items()}
    return ctx.replace(
        params=params,
        model_state=model_state,
        opt_state={**ctx.opt_state, name: own} if name else own,
        outputs={**ctx.outputs, **metrics},
    )


def _accumulate(phase: Phase, ctx: StepContext) -> StepContext:
    """Keeps the gradients for a later update."""
    return ctx.replace(opt_state=phase.optim_wrapper.accumulate(ctx.grads, ctx.opt_state, ctx.loss_weight))


def _moved(state: TrainState, ctx: StepContext, hook_state: Mapping[str, PyTree]) -> TrainState:
    """The state after an iteration that counts."""
    return state.replace(
        step=state.step + 1,
        params=ctx.params,
        model_state=strongly_typed(ctx.model_state),  # or the next call, which gets it back, would be traced again
        opt_state=ctx.opt_state,
        hook_state=strongly_typed(dict(hook_state)),
    )


def _left(state: TrainState, updating: Any, hook_state: dict[str, PyTree]) -> TrainState:
    """The state after an iteration that does not; dropping one that updates clears the window that it was to end."""
    opt_state = state.opt_state if updating is None else updating.zero_grad(state.opt_state)
    return state.replace(step=state.step + 1, opt_state=opt_state, hook_state=hook_state)


def _finish_if_accepted(
    finish: Callable[..., tuple[TrainState, Outputs]],
    ctx: StepContext,
    hook_state: Mapping[str, PyTree],
    left: TrainState,
) -> tuple[TrainState, Outputs]:
    """`finish(ctx, hook_state)` where the step is accepted, else `left`; what was not computed is reported as NaN."""
    names = jax.eval_shape(finish, ctx, hook_state)[1]

    def leave(ctx: StepContext, hook_state: Mapping[str, PyTree]) -> tuple[TrainState, Outputs]:
        return left, {
            name: ctx.outputs.get(name, jnp.full(like.shape, jnp.nan, like.dtype)) for name, like in names.items()
        }

    # a branch, not a selection on every leaf: that costs four times the update
    return jax.lax.cond(ctx.accept, finish, leave, ctx, hook_state)


def _with_total(outputs: Outputs, parts: Sequence[Phase]) -> Outputs:
    """The outputs with 'loss', the sum of the phases' totals, where there are phases."""
    totals = [outputs[f"loss_{name}"] for name in dict.fromkeys(part.name for part in parts) if name]
    return {**outputs, "loss": sum(totals[1:], start=totals[0])} if totals else outputs


def build_eval_step(model: "Model", update_metrics: Callable[[PyTree, PyTree, PyTree], PyTree]) -> EvalStep:
    """Builds `step(params, model_state, metrics, batch) -> (metrics, predictions)`, pure and not compiled.

    Args:
      model: gives the predictions.
      update_metrics: `(metrics, predictions, batch) -> metrics`, an evaluator's sums (see `Evaluator.update`).
    """

    def step(params: PyTree, model_state: PyTree, metrics: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        predictions = model.predict(params, model_state, batch)
        return update_metrics(metrics, predictions, batch), predictions

    return step
