"""The training step and the evaluation step: pure functions, for the caller to compile."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from jengine.train.context import StepContext
from jengine.train.losses import total_loss
from jengine.train.state import TrainState
from jengine.train.traced_hooks import TracedHooks

if TYPE_CHECKING:
    from jengine.model import Model
    from jengine.optim import OptimWrapper

PyTree = Any
Outputs = dict[str, jax.Array]
TrainStep = Callable[[TrainState, PyTree, Mapping[str, Any]], tuple[TrainState, Outputs]]
EvalStep = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def build_train_step(
    model: "Model", optim_wrapper: "OptimWrapper", hooks: Sequence[Any] = (), *, update: bool = True
) -> TrainStep:
    """Builds `step(state, batch, hyperparams) -> (state, outputs)`.

    The step is pure and not compiled: `jax.jit(step, donate_argnums=0)` is what the Runner does with it. Whatever
    changes from one iteration to the next comes in through the arguments, so it is traced once.

    Args:
      model: gives the losses.
      optim_wrapper: turns gradients into updates.
      hooks: their traced points are compiled in, in this order.
      update: False builds the step of an iteration that only accumulates gradients (see `accumulative_counts`): the
        optimizer, and with it `traced_update`, is left out.

    Returns:
      The step. Its outputs are scalars f32[] by name: 'loss' (the total), each loss of the model, 'grad_norm' where
      gradients are clipped by norm, and what hooks add.
    """
    traced = TracedHooks(hooks)

    def step(state: TrainState, batch: PyTree, hyperparams: Mapping[str, Any]) -> tuple[TrainState, Outputs]:
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

        def loss_fn(params: PyTree) -> tuple[jax.Array, tuple[Outputs, PyTree]]:
            losses, model_state = model.loss(
                params, ctx.model_state, ctx.batch, rng=ctx.rng, hyperparams=ctx.hyperparams
            )
            total, outputs = total_loss(losses, ctx.batch)
            return total, (outputs, model_state)

        (_, (outputs, model_state)), grads = optim_wrapper.value_and_grad(loss_fn, has_aux=True)(
            ctx.params, ctx.opt_state
        )
        ctx = ctx.replace(model_state=model_state, grads=grads, outputs={**ctx.outputs, **outputs})
        ctx, hook_state = traced.run("traced_grads", ctx, hook_state)

        if update:
            updates, opt_state = optim_wrapper.update(ctx.grads, ctx.opt_state, ctx.params, ctx.hyperparams)
            ctx = ctx.replace(
                params=optax.apply_updates(ctx.params, updates),
                opt_state=opt_state,
                outputs={**ctx.outputs, **opt_state.metrics},
            )
            ctx, hook_state = traced.run("traced_update", ctx, hook_state)
        else:
            ctx = ctx.replace(opt_state=optim_wrapper.accumulate(ctx.grads, ctx.opt_state))

        state = state.replace(
            step=state.step + 1,
            params=ctx.params,
            model_state=ctx.model_state,
            opt_state=ctx.opt_state,
            hook_state=dict(hook_state),
        )
        return state, ctx.outputs

    return step


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
