"""The training step and the evaluation step, pure functions that the caller compiles."""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.errors import closest
from jengine.model import CastModel, Model, Precision
from jengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from jengine.optim.optimizers.common import strip_weak_types
from jengine.optim.transforms.loss_scale import all_finite
from jengine.train.losses import loss_weight, mean_over_replicas, total_loss
from jengine.train.state import TrainState
from jengine.train.traced_hooks import StepContext, TracedHooks

PyTree = Any
Metrics = OrderedDict[str, jax.Array]  # JAX sorts the keys of a dict
Constrain = Callable[[PyTree, str], PyTree]
EvalStep = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class Phase(NamedTuple):
    """A part of the training step: one optimizer and the loss that it minimizes."""

    name: str  # '' for a single optimizer
    optim_wrapper: OptimWrapper
    loss: Callable[..., Any]  # (params, model_state, batch, *, rng, hyperparams) -> (losses, model_state)


class Gradients(NamedTuple):
    """Result of the first half of a step, from which the second computes the new state."""

    ctx: StepContext  # with the gradients, after `traced_grads`
    hook_state: Mapping[str, PyTree]
    model_state: PyTree  # before the iteration
    rng: jax.Array  # key<fry>[], this iteration's


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """One iteration, `step(state, batch, hyperparams) -> (state, metrics)`, in two halves.

    In a chunk the first half is shared by iterations that update and iterations that only accumulate.

    Attributes:
      differentiate: `(state, batch, hyperparams, is_update) -> gradients`, where `is_update` may be a bool[]; with
        accumulation they are added to those in the window.
      finish: `(state, gradients) -> (state, metrics)`: update the parameters, or only accumulate.
      update: whether `finish` updates.
      constrain: see `build_train_step`.
      hooks: the hooks whose traced points are part of the step.
    """

    differentiate: Callable[[TrainState, PyTree, Any, bool | jax.Array], Gradients]
    finish: Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]
    update: bool
    constrain: Constrain
    hooks: TracedHooks

    def __call__(self, state: TrainState, batch: PyTree, hyperparams: Any) -> tuple[TrainState, Metrics]:
        """Run one iteration."""
        return self.finish(state, self.differentiate(state, batch, hyperparams, self.update))


def build_train_step(
    model: Model,
    optim_wrapper: OptimWrapper | OptimWrapperDict,
    hooks: Sequence[Any] = (),
    *,
    update: bool = True,
    phases: Sequence[tuple[str, int]] | None = None,
    constrain: Constrain = lambda tree, under: tree,
    gather_tables: Callable[[PyTree], PyTree] = lambda params: params,
) -> TrainStep:
    """Build `step(state, batch, hyperparams) -> (state, metrics)`.

    The step is pure and not compiled; the Runner calls `jax.jit(step, donate_argnums=0)`. All values that change from
    one iteration to the next are arguments, so the step is traced once.

    >>> from jengine.model import FunctionalModel
    >>> from jengine.optim import SGD
    >>> from jengine.train import create_train_state
    >>> model = FunctionalModel(lambda: {"w": jnp.zeros(())}, loss=lambda p, x: (p["w"] - x) ** 2, predict=None)
    >>> wrapper, rng = OptimWrapper(SGD(lr=0.25)), jax.random.key(0)
    >>> step = jax.jit(build_train_step(model, wrapper))
    >>> state = create_train_state(*model.init(rng, None), wrapper, rng=rng)
    >>> state, metrics = step(state, jnp.array(4.0), wrapper.hyperparams)
    >>> state.params["w"].item(), metrics["loss"].item()
    (2.0, 16.0)

    Args:
      model: computes the losses.
      optim_wrapper: turns gradients into updates; several, by name, for a model with `phase_loss`.
      hooks: hooks whose traced points become part of the step, in this order.
      update: False builds the step for an iteration that only accumulates gradients (see `accumulative_counts`),
        without the optimizer, and with `traced_accumulate` instead of `traced_update`.
      phases: for several optimizers, the order in which they act in a step and how often: `[('disc', 2), ('gen', 1)]`;
        by default each acts once. All use the same batch, each time with a different key.
      constrain: sets the shardings for a part of the state, `(tree, dotted path with a final dot) -> tree`; see
        `Strategy.constrain`. It is called with the gradients and with the new state.
      gather_tables: gathers the parameters that the model may not use in shards; see `Strategy.gather_tables`.

    Returns:
      The step. Its metrics are scalars f32[] by name, in this order: 'loss' (the total), each model loss in the model's
      order, 'grad_norm' if gradients are clipped by norm, and hook metrics. With phases, 'loss_<phase>' are the totals.

    Raises:
      ValueError: a phase that is not the name of an optimizer, or phases for a single optimizer.
    """
    built = _build_phases(model, optim_wrapper, phases)
    halves = _Halves(built, optim_wrapper, TracedHooks(hooks), update, constrain, gather_tables)
    return TrainStep(halves.differentiate, halves.finish, update, constrain, halves.hooks)


@dataclasses.dataclass(frozen=True)
class _Halves:
    """What the two halves of a step share; see `build_train_step`."""

    phases: Sequence[Phase]
    optim_wrapper: OptimWrapper | OptimWrapperDict
    hooks: TracedHooks
    update: bool
    constrain: Constrain
    gather_tables: Callable[[PyTree], PyTree]

    def differentiate(
        self, state: TrainState, batch: PyTree, hyperparams: Mapping[str, Any], is_update: bool | jax.Array
    ) -> Gradients:
        """Compute the gradients; for several optimizers, the last one's, after the updates of the others."""
        rng = jax.random.fold_in(state.key, state.step)
        last = self.phases[-1]
        ctx = StepContext(
            step=state.step,
            rng=rng,
            batch=batch,
            hyperparams=hyperparams,
            params=state.params,
            model_state=state.model_state,
            opt_state=state.opt_state,
            axis_name=last.optim_wrapper.axis_name,
        )
        ctx, hook_state = self.hooks.run("traced_batch", ctx, state.hook_state)
        for i, phase in enumerate(self.phases):
            model_state = ctx.model_state
            phase_rng = jax.random.fold_in(rng, i) if phase.name else rng  # phases must not share dropout masks
            ctx = self._differentiate(phase, ctx.replace(rng=phase_rng), is_update)
            ctx, hook_state = self.hooks.run("traced_grads", ctx, hook_state)
            if i + 1 < len(self.phases):
                ctx = _update(phase, ctx, model_state)
        if ctx.apply_update is not None and ctx.axis_name is not None:  # replicas must take the same branch
            ctx = ctx.replace(apply_update=jax.lax.pmin(ctx.apply_update.astype(jnp.int32), ctx.axis_name) > 0)
        if last.optim_wrapper.accumulates:
            ctx = _accumulate(last, ctx, model_state)
        return Gradients(ctx.replace(metrics=OrderedDict(ctx.metrics)), hook_state, model_state, rng)

    def finish(self, state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
        """Update the parameters or only accumulate, unless a hook skips the step."""
        if gradients.ctx.apply_update is None:
            return self._apply(state, gradients)
        shapes = jax.eval_shape(self._apply, state, gradients)[1]
        skipped = state.replace(
            step=state.step + 1,
            # a skipped update clears the accumulated gradients too
            opt_state=self.optim_wrapper.zero_grad(state.opt_state) if self.update else state.opt_state,
            hook_state=self.hooks.states_after_skip(state.hook_state, gradients.hook_state),
        )
        metrics = gradients.ctx.metrics

        def skip(state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
            return self.constrain(skipped, ""), OrderedDict(
                (name, metrics.get(name, jnp.full(shape.shape, jnp.nan, shape.dtype))) for name, shape in shapes.items()
            )

        # a branch, since a selection on every leaf would cost four times the update
        state, metrics = jax.lax.cond(gradients.ctx.apply_update, self._apply, skip, state, gradients)
        return self.constrain(state, ""), metrics

    def _apply(self, state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
        ctx, hook_state, model_state, rng = gradients
        if self.update:
            ctx = _update(self.phases[-1], ctx, model_state)
        is_updated = _is_updated(self.phases, ctx.opt_state) if self.update else None
        ctx = ctx.replace(rng=rng, metrics=_add_total(ctx.metrics, self.phases), is_updated=is_updated)
        ctx, hook_state = self.hooks.run("traced_update" if self.update else "traced_accumulate", ctx, hook_state)
        metrics = OrderedDict(ctx.metrics)
        metrics.move_to_end("loss", last=False)  # hooks may have added metrics before it
        next_state = state.replace(
            step=state.step + 1,
            params=ctx.params,
            model_state=strip_weak_types(ctx.model_state),  # a weak type would make the next call trace again
            opt_state=ctx.opt_state,
            hook_state=strip_weak_types(dict(hook_state)),
        )
        return self.constrain(next_state, ""), metrics

    def _differentiate(self, phase: Phase, ctx: StepContext, is_update: bool | jax.Array) -> StepContext:
        """Add the losses, the new model state and the gradients to the context."""
        wrapper = phase.optim_wrapper
        is_averaged = wrapper.accumulative_counts > 1 or wrapper.axis_name is not None

        def loss_fn(params: PyTree) -> tuple[jax.Array, tuple[Metrics, PyTree, jax.Array | None]]:
            params = self.gather_tables(params)
            losses, state = phase.loss(params, ctx.model_state, ctx.batch, rng=ctx.rng, hyperparams=ctx.hyperparams)
            total, metrics = total_loss(losses, ctx.batch)
            weight = loss_weight(losses, ctx.batch) if is_averaged else None
            return total, (metrics, state, weight)

        opt_state = ctx.opt_state[phase.name] if phase.name else ctx.opt_state
        (_, (metrics, model_state, weight)), grads = wrapper.value_and_grad(loss_fn, has_aux=True)(
            ctx.params, opt_state
        )
        # Otherwise XLA may choose other shardings, for instance because of a branch that does not use the gradients.
        grads = self.constrain(grads, "params.")
        if wrapper.axis_name is not None:  # an iteration that only accumulates has no collectives
            mean = functools.partial(mean_over_replicas, axis_name=wrapper.axis_name)
            metrics = choose(is_update, mean, lambda metrics, weight: metrics, metrics, weight)
        if phase.name:
            metrics = OrderedDict((f"loss_{phase.name}" if k == "loss" else k, v) for k, v in metrics.items())
        return ctx.replace(model_state=model_state, grads=grads, loss_weight=weight, metrics={**ctx.metrics, **metrics})


def _build_phases(model: Model, optim_wrapper: Any, phases: Sequence[tuple[str, int]] | None) -> list[Phase]:
    """Return the phases of a step in order; a phase that acts several times is repeated."""
    if not isinstance(optim_wrapper, Mapping):
        if phases is not None:
            raise ValueError(f"phases must be None for a single optimizer, got {list(phases)}")
        return [Phase("", optim_wrapper, _apply_precision(model, optim_wrapper).loss)]
    built = []
    for name, count in [(name, 1) for name in optim_wrapper] if phases is None else phases:
        if name not in optim_wrapper:
            raise ValueError(f"phases must name optimizers, got {name!r}{closest(name, optim_wrapper)}")
        if optim_wrapper[name].accumulative_counts > 1:
            raise ValueError(
                f"accumulative_counts of {name!r} must be 1 with several optimizers in one step, got "
                f"{optim_wrapper[name].accumulative_counts}"
            )
        loss = functools.partial(_apply_precision(model, optim_wrapper[name]).phase_loss, name)
        built += [Phase(name, optim_wrapper[name], loss)] * count
    return built


def _apply_precision(model: Model, optim_wrapper: Any) -> Model:
    """Return the model in the wrapper's compute dtype, if it has one."""
    if isinstance(optim_wrapper, AmpOptimWrapper):
        return CastModel(model, Precision(compute=optim_wrapper.dtype))
    return model


def _update(phase: Phase, ctx: StepContext, old_model_state: PyTree) -> StepContext:
    """Apply the optimizer of the phase to the parameters."""
    name, wrapper = phase.name, phase.optim_wrapper
    opt_state, hyperparams = ctx.opt_state, ctx.hyperparams
    if name:  # hyperparameters of hooks, such as `frozen:PATTERN`, are for all optimizers
        shared = {key: value for key, value in hyperparams.items() if not isinstance(value, Mapping)}
        opt_state, hyperparams = opt_state[name], {**hyperparams[name], **shared}

    def value_fn(params: PyTree) -> jax.Array:
        """Return the total loss as a function of the parameters alone, for line searches."""
        losses, _ = phase.loss(params, old_model_state, ctx.batch, rng=ctx.rng, hyperparams=ctx.hyperparams)
        total, _ = total_loss(losses, ctx.batch)
        if wrapper.axis_name is None:
            return total
        weight = loss_weight(losses, ctx.batch)
        return mean_over_replicas(OrderedDict(loss=total), weight, wrapper.axis_name)["loss"]

    params, new_opt_state = wrapper.apply_gradients(
        ctx.grads,
        opt_state,
        ctx.params,
        hyperparams,
        ctx.loss_weight,
        is_added=wrapper.accumulates,
        value=ctx.metrics[f"loss_{name}" if name else "loss"],
        grad=ctx.grads,
        value_fn=value_fn,
    )
    model_state, finite = ctx.model_state, wrapper.is_finite(new_opt_state)
    if finite is not None and not wrapper.accumulates:  # after an overflow the model state is kept as well
        model_state = _select(finite, model_state, old_model_state)
    metrics = {
        f"{key}_{name}" if name else key: value for key, value in wrapper.metrics(opt_state, new_opt_state).items()
    }
    return ctx.replace(
        params=params,
        model_state=model_state,
        opt_state={**ctx.opt_state, name: new_opt_state} if name else new_opt_state,
        metrics={**ctx.metrics, **metrics},
    )


def _is_updated(phases: Sequence[Phase], opt_state: PyTree) -> jax.Array | None:
    """Return whether the last update of some optimizer was applied, bool[]; None where none is ever skipped."""
    own = [opt_state[phase.name] if phase.name else opt_state for phase in phases]
    finite = [phase.optim_wrapper.is_finite(state) for phase, state in zip(phases, own, strict=True)]
    known = [flag for flag in finite if flag is not None]
    return jnp.any(jnp.stack(known)) if len(known) == len(finite) else None


def _accumulate(phase: Phase, ctx: StepContext, old_model_state: PyTree) -> StepContext:
    """Add the gradients to the accumulator.

    An update does this too before it begins: in a chunk the sum is then outside of the branch, within which XLA would
    round it differently than in a single step.
    """
    opt_state = phase.optim_wrapper.accumulate(ctx.grads, ctx.opt_state, ctx.loss_weight)
    model_state = ctx.model_state
    if phase.optim_wrapper.is_finite(opt_state) is not None and jax.tree.leaves(model_state):
        # The decision on the update comes too late: it is one for the whole window. A replica's gradients may overflow
        # where the batch's do not, so the statistics themselves decide.
        floats = [x for x in jax.tree.leaves(model_state) if jnp.issubdtype(x.dtype, jnp.floating)]
        model_state = _select(all_finite(floats), model_state, old_model_state)
    return ctx.replace(opt_state=opt_state, model_state=model_state)


def _select(condition: jax.Array, then: PyTree, otherwise: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), then, otherwise)


def choose(predicate: bool | jax.Array, then: Callable[..., Any], otherwise: Callable[..., Any], *args: Any) -> Any:
    """Return `then(*args)` or `otherwise(*args)`; a Python bool leaves only that one in the program."""
    if isinstance(predicate, bool):
        return then(*args) if predicate else otherwise(*args)
    return jax.lax.cond(predicate, then, otherwise, *args)


def _add_total(metrics: dict[str, jax.Array], phases: Sequence[Phase]) -> dict[str, jax.Array]:
    """Add 'loss', summed over all phases, if there are several optimizers."""
    totals = [metrics[f"loss_{name}"] for name in dict.fromkeys(phase.name for phase in phases) if name]
    return {**metrics, "loss": sum(totals[1:], start=totals[0])} if totals else metrics


def build_eval_step(model: Model, update_metrics: Callable[[PyTree, PyTree, PyTree], PyTree]) -> EvalStep:
    """Build `step(params, model_state, metrics, batch) -> (metrics, predictions)`, pure and not compiled.

    Args:
      model: computes the predictions.
      update_metrics: `(metrics, predictions, batch) -> metrics`, adds a batch to sums (see `Evaluator.update`).
    """

    def step(params: PyTree, model_state: PyTree, metrics: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        predictions = model.predict(params, model_state, batch)
        return update_metrics(metrics, predictions, batch), predictions

    return step
