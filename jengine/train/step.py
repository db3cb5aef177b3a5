"""The training step and the evaluation step, pure functions that the caller compiles."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.config.errors import ConfigError
from jengine.config.plugins import load_provided
from jengine.data.batch_check import Batch
from jengine.data.masking import get_mask
from jengine.model.model import Model, predict_with_key, prediction_key
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict, wrappers_by_name
from jengine.train import phases as parts
from jengine.train.hyperparams import HyperparamsVector
from jengine.train.kept_types import keep_types
from jengine.train.phases import Constrain, Gather, Metrics, Phase, PhaseConfig, build_phases
from jengine.train.state import TrainState
from jengine.train.traced_hooks import StepContext, TracedHooks

PyTree = Any
StepHyperparams = Mapping[str, Any] | HyperparamsVector
HookStates = Mapping[str, PyTree]
WEIGHT = "(weight)"  # metric of a step with `weighs`
EvalStep = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class Gradients(NamedTuple):
    """Result of the first half of a step, from which the second computes the new state."""

    # with the gradients, after `traced_grads`; with the updates, if the first half has made them
    ctx: StepContext
    hook_state: HookStates
    # f32[], share of real examples in a replica's batch; None without a mask
    share: jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity, for `jax.jit`
class TrainStep:
    """One iteration, `step(state, batch, hyperparams) -> (state, metrics)`, in two halves.

    In a chunk the first half is shared by iterations that update and iterations that only
    accumulate.

    Attributes:
      phases: the updates, in order; none with `own`.
      own: the model's own step, of the extra `optimizers`.
      optim_wrapper, constrain, gather_tables: see `build_train_step`.
      hooks: the hooks whose traced points are part of the step.
      update: whether `finish` updates.
      intervals: iterations between two reports, by name, for metrics of phases that act every n-th
        iteration (NaN in the others); known once the step is traced.
      weighs: add the metric `WEIGHT` if the iterations may have different weights in a mean: the
        share of real examples in a batch with a mask, and 0 for a step that a hook has dropped.
      by_example: the names of the model's metrics, means over the examples; known once the step is
        traced.
    """

    phases: Sequence[Phase]
    own: Callable[..., tuple[StepContext, Mapping[str, PyTree]]] | None
    optim_wrapper: OptimWrapper | OptimWrapperDict
    hooks: TracedHooks
    update: bool
    constrain: Constrain
    gather_tables: Gather
    intervals: dict[str, int] = dataclasses.field(default_factory=dict)
    weighs: bool = False
    by_example: set[str] = dataclasses.field(default_factory=lambda: {"loss"})

    def __call__(
        self, state: TrainState, batch: Batch, hyperparams: StepHyperparams
    ) -> tuple[TrainState, Metrics]:
        """Run one iteration."""
        return self.finish(state, self.differentiate(state, batch, hyperparams))

    def differentiate(
        self, state: TrainState, batch: Batch, hyperparams: StepHyperparams
    ) -> Gradients:
        """Compute the gradients; for several optimizers or the model's own step, the updates too.

        `batch` may be the tuple of an iteration's batches, and `hyperparams` are by name or a
        vector. With accumulation the gradients are added to those in the window, whether the
        iteration updates or not.
        """
        batches = batch if any(phase.batch for phase in self.phases) else (batch,)
        axis_name = next(iter(wrappers_by_name(self.optim_wrapper).values())).axis_name
        key = state.key
        # without a key of their own, replicas would drop out the same units
        if axis_name is not None and jax.lax.axis_size(axis_name) > 1:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        # no chain of splits: a resumed run has the same keys
        rng = jax.random.fold_in(key, state.step)
        ctx = StepContext(
            step=state.step,
            rng=rng,
            batch=batches[0],
            hyperparams=hyperparams.unravel(state.step)
            if isinstance(hyperparams, HyperparamsVector)
            else hyperparams,
            params=state.params,
            model_state=state.model_state,
            opt_state=state.opt_state,
            old_params=state.params,
            axis_name=axis_name,  # which all optimizers share
        )
        ctx, hook_state = self.hooks.run("traced_batch", ctx, state.hook_state)
        if self.own is not None:
            ctx, hook_state = self.own(state, ctx, hook_state, self.hooks)
            self.by_example.update(ctx.metrics)
        elif isinstance(self.optim_wrapper, Mapping):
            ctx, hook_state = self._run_phases(ctx, hook_state, batches)
        else:
            ctx, hook_state = self._differentiate(self.phases[0], ctx, hook_state)
        # replicas must take the same branch
        if ctx.apply_update is not None and ctx.axis_name is not None:
            ctx = ctx.replace(
                apply_update=jax.lax.pmin(ctx.apply_update.astype(jnp.int32), ctx.axis_name) > 0
            )
        if self.optim_wrapper.accumulates:
            ctx = parts.accumulate(self.phases[0], ctx, state.model_state)
        ctx = ctx.replace(rng=rng, metrics=OrderedDict(ctx.metrics))
        shares = [
            jnp.asarray(mask, jnp.float32).mean()
            for x in batches
            if (mask := get_mask(x)) is not None
        ]
        return Gradients(ctx, hook_state, jnp.stack(shares).mean() if shares else None)

    def finish(self, state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
        """Update the parameters or only accumulate, unless a hook skips the step."""
        new_state, metrics = self._apply_unless_skipped(state, gradients)
        if (weight := self._weight(gradients)) is not None:
            metrics[WEIGHT] = weight
        return new_state, metrics

    def _weight(self, gradients: Gradients) -> jax.Array | None:
        """Return the weight of the iteration in a mean over several, f32[].

        None if all have the same.
        """
        weight = gradients.share
        keep = gradients.ctx.apply_update
        axis = gradients.ctx.axis_name
        if not self.weighs or (weight is None and keep is None):
            return None
        if weight is None:
            weight = jnp.ones((), jnp.float32)
        elif axis is not None and self.update:  # a step that only accumulates has no collectives
            weight = jax.lax.pmean(weight, axis)
        return weight if keep is None else jnp.where(keep, weight, 0.0)

    def _apply_unless_skipped(
        self, state: TrainState, gradients: Gradients
    ) -> tuple[TrainState, Metrics]:
        if gradients.ctx.apply_update is None:
            return self._apply(state, gradients)
        # both branches must return these metrics
        shapes = jax.eval_shape(self._apply, state, gradients)[1]
        skipped = state.replace(
            step=state.step + 1,
            # a skipped update clears the accumulated gradients too
            opt_state=self.optim_wrapper.zero_grad(state.opt_state)
            if self.update
            else state.opt_state,
            hook_state=self.hooks.states_after_skip(state.hook_state, gradients.hook_state),
        )
        metrics = gradients.ctx.metrics

        def skip(state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
            return self.constrain(skipped, ""), OrderedDict(
                (name, metrics.get(name, jnp.full(shape.shape, jnp.nan, shape.dtype)))
                for name, shape in shapes.items()
            )

        # a branch, since a selection on every leaf would cost four times the update
        state, metrics = jax.lax.cond(
            gradients.ctx.apply_update, self._apply, skip, state, gradients
        )
        return self.constrain(state, ""), metrics

    def _apply(self, state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
        ctx = gradients.ctx
        hook_state = gradients.hook_state
        if self.update and not isinstance(self.optim_wrapper, Mapping) and self.own is None:
            ctx = parts.update(self.phases[0], ctx, state.model_state)
        ctx = ctx.replace(
            is_updated=parts.is_updated(self.optim_wrapper, ctx.opt_state) if self.update else None
        )
        ctx, hook_state = self.hooks.run(
            "traced_update" if self.update else "traced_accumulate", ctx, hook_state
        )
        metrics = OrderedDict(ctx.metrics)
        metrics.move_to_end("loss", last=False)  # hooks may have added metrics before it
        next_state = state.replace(
            step=state.step + 1,
            params=keep_types(state.params, ctx.params, "params."),
            model_state=keep_types(state.model_state, ctx.model_state, "model_state."),
            opt_state=keep_types(state.opt_state, ctx.opt_state, "opt_state."),
            hook_state=dict(hook_state),
        )
        return self.constrain(next_state, ""), metrics

    def _differentiate(
        self, phase: Phase, ctx: StepContext, hook_state: HookStates
    ) -> tuple[StepContext, HookStates]:
        """Add the gradients, as the hooks have changed them."""
        before = ctx.metrics
        ctx = parts.differentiate(phase, ctx, self.constrain, self.gather_tables)
        self.by_example.update(name for name in ctx.metrics if name not in before)
        return self.hooks.run("traced_grads", ctx, hook_state)

    # --- Several optimizers ---

    def _run_phases(
        self, ctx: StepContext, hook_state: HookStates, batches: Sequence[Batch]
    ) -> tuple[StepContext, HookStates]:
        """Run all phases, each with a key and maybe a batch of its own, and add the total loss."""
        rng = ctx.rng
        hyperparams = ctx.hyperparams
        batch = 0
        totals: dict[str, jax.Array] = {}
        rare: dict[str, jax.Array] = {}  # metrics of phases that act every n-th iteration
        for i, phase in enumerate(self.phases):
            if phase.batch != batch:  # hooks see each batch once, augmentations too
                batch = phase.batch
                batch_ctx = ctx.replace(
                    batch=batches[batch],
                    hyperparams=hyperparams,
                    rng=jax.random.fold_in(rng, len(self.phases) + batch),
                )
                ctx, hook_state = self.hooks.run("traced_batch", batch_ctx, hook_state)
            ctx = ctx.replace(rng=jax.random.fold_in(rng, i))  # phases must not share dropout masks
            # A phase fused with the one before would round otherwise in a chunk than in a single
            # step.
            params, opt_state = jax.lax.optimization_barrier((ctx.params, ctx.opt_state))
            ctx = ctx.replace(params=params, opt_state=opt_state)
            is_due = True if phase.every == 1 else (ctx.step + 1) % phase.every == 0
            before = ctx.metrics
            ctx, hook_state = self._run_phase(phase, ctx, hook_state, is_due)
            loss = ctx.metrics[f"loss_{phase.name}"]
            totals[phase.name] = (
                loss if is_due is True else jnp.where(is_due, loss, totals.get(phase.name, 0.0))
            )
            # hooks would take the NaN of a phase that does not act for a failure
            if is_due is not True:
                added = {name: value for name, value in ctx.metrics.items() if name not in before}
                rare |= added
                ctx = ctx.replace(
                    metrics={name: value for name, value in ctx.metrics.items() if name in before}
                )
        first, *others = totals.values()
        return ctx.replace(
            metrics={**rare, **ctx.metrics, "loss": sum(others, start=first)}
        ), hook_state

    def _run_phase(
        self, phase: Phase, ctx: StepContext, hook_state: HookStates, is_due: bool | jax.Array
    ) -> tuple[StepContext, HookStates]:
        """Run one phase if it is due."""
        before = ctx.replace(metrics=OrderedDict(ctx.metrics))  # a branch sorts the names in a dict

        def act() -> tuple[tuple[Any, ...], HookStates]:
            ctx, states = self._differentiate(phase, before, hook_state)
            ctx = parts.update(phase, ctx, before.model_state)
            return _changed(ctx.replace(metrics=OrderedDict(ctx.metrics))), states

        def skip() -> tuple[tuple[Any, ...], HookStates]:
            unknown = {
                name: jnp.full(like.shape, jnp.nan, like.dtype) for name, like in missing.items()
            }
            ctx = before.replace(metrics=OrderedDict({**before.metrics, **unknown}))
            if before.apply_update is None and decides:
                ctx = ctx.replace(apply_update=jnp.ones((), bool))
            return _changed(ctx), hook_state

        if is_due is True:
            changed, states = act()
            for name, value in changed[_CHANGED.index("metrics")].items():
                if before.metrics.get(name) is not value:
                    self.intervals.pop(name, None)
        else:
            shapes = dict(zip(_CHANGED, jax.eval_shape(act)[0], strict=True))
            decides = shapes["apply_update"]
            missing = {
                name: like for name, like in shapes["metrics"].items() if name not in before.metrics
            }
            self.intervals.update(dict.fromkeys(missing, phase.every))
            changed, states = jax.lax.cond(is_due, act, skip)
        return ctx.replace(**dict(zip(_CHANGED, changed, strict=True))), states


# what a phase changes in the context
_CHANGED = ("params", "model_state", "opt_state", "metrics", "apply_update")


def _changed(ctx: StepContext) -> tuple[Any, ...]:
    return tuple(getattr(ctx, name) for name in _CHANGED)


def build_train_step(
    model: Model,
    optim_wrapper: OptimWrapper | OptimWrapperDict,
    hooks: Sequence[Any] = (),
    *,
    update: bool = True,
    phases: Sequence[PhaseConfig] | None = None,
    constrain: Constrain = lambda tree, under: tree,
    gather_tables: Gather = lambda params: params,
    micro_batches: int = 1,
    weighs: bool = False,
) -> TrainStep:
    """Build `step(state, batch, hyperparams) -> (state, metrics)`.

    The step is pure and not compiled; the Runner calls `jax.jit(step, donate_argnums=0)`. All
    values that change from one iteration to the next are arguments, so the step is traced once.

    >>> from jengine.model.functional import FunctionalModel
    >>> from jengine.optim.optimizers.sgd import SGD
    >>> from jengine.train.state import create_train_state
    >>> model = FunctionalModel(
    ...     lambda: {"w": jnp.zeros(())}, loss=lambda p, x: (p["w"] - x) ** 2, predict=None
    ... )
    >>> wrapper, rng = OptimWrapper(SGD(lr=0.25)), jax.random.key(0)
    >>> step = jax.jit(build_train_step(model, wrapper))
    >>> state = create_train_state(*model.init(rng, None), wrapper, rng=rng)
    >>> state, metrics = step(state, jnp.array(4.0), wrapper.hyperparams)
    >>> state.params["w"].item(), metrics["loss"].item()
    (2.0, 16.0)

    Args:
      model: computes the losses; its own `train_step`, if it has one, replaces the built-in
        differentiation.
      optim_wrapper: turns gradients into updates; several, by name, for a model with `phase_loss`.
      hooks: hooks whose traced points become part of the step, in this order.
      update: False builds the step for an iteration that only accumulates gradients (see
        `accumulative_counts`), without the optimizer, and with `traced_accumulate` instead of
        `traced_update`.
      phases: for several optimizers, the order in which they act in a step and how often:
        `[('disc', 2), ('gen', 1)]`; by default each acts once. Dicts set more, see `PhaseSettings`.
        Each update has a different key; if an iteration takes several batches, `batch` is their
        tuple.
      constrain: sets the shardings for a part of the state, `(tree, dotted path with a final dot)
        -> tree`; see `Strategy.constrain`. It is called with the gradients and with the new state.
      gather_tables: gathers the parameters that the model may not use in shards; see
        `Strategy.gather_tables`.
      micro_batches: number of parts of the batch that are computed one after the other, see
        `differentiate_in_parts`; for a single optimizer without a `train_step` of the model.
      weighs: see `TrainStep`.

    Returns:
      The step. Its metrics are scalars f32[] by name, in this order: 'loss' (the total), each model
      loss in the model's order, 'grad_norm' if gradients are clipped by norm, and hook metrics.
      With phases, 'loss_<phase>' are the totals.

    Raises:
      ValueError: a phase that is not the name of an optimizer, phases for a single optimizer, or
        accumulation or phases for a model with its own `train_step`.
    """
    own = None
    if model.has_train_step:
        build_own_step = load_provided("optimizer_parts", "build_own_step")
        own = build_own_step(model, optim_wrapper, phases, constrain, gather_tables)
    accumulates = any(x.accumulates for x in wrappers_by_name(optim_wrapper).values())
    # Refused and not ignored: these steps are updates as a whole.
    if (own or isinstance(optim_wrapper, Mapping)) and (micro_batches > 1 or accumulates):
        raise ConfigError(
            "`train_cfg.micro_batch` must be None and `accumulative_counts` 1 with several "
            "optimizers and with a model that has its own train_step"
        )
    built = [] if own else build_phases(model, optim_wrapper, phases, micro_batches)
    return TrainStep(
        built,
        own,
        optim_wrapper,
        TracedHooks(hooks),
        update,
        constrain,
        gather_tables,
        weighs=weighs,
    )


def build_eval_step(
    model: Model, update_metrics: Callable[[PyTree, PyTree, PyTree], PyTree], seed: int = 0
) -> EvalStep:
    """Build `step(params, model_state, metrics, batch) -> (metrics, predictions)`, pure and not
    compiled.

    Args:
      model: computes the predictions.
      update_metrics: `(metrics, predictions, batch) -> metrics`, adds a batch to sums (see
        `Evaluator.update`).
      seed: for a model whose `predict` takes a key; the metrics count the batches then, see
        `prediction_key`.
    """

    def step(
        params: PyTree, model_state: PyTree, metrics: PyTree, batch: Batch
    ) -> tuple[PyTree, PyTree]:
        rng = prediction_key(seed, metrics.batches) if model.predicts_with_rng else None
        predictions = predict_with_key(model, params, model_state, batch, rng)
        return update_metrics(metrics, predictions, batch), predictions

    return step


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class FlatMetrics:
    """Metrics of a step in the order of the model.

    JAX would sort a dict, and flattens an OrderedDict in Python.
    """

    values: tuple[jax.Array, ...]
    names: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))


def with_flat_metrics(
    step: Callable[..., tuple[TrainState, Metrics]],
) -> Callable[..., tuple[TrainState, FlatMetrics]]:
    """Return a step with its metrics as `FlatMetrics`."""

    def run(*args: Any) -> tuple[TrainState, FlatMetrics]:
        state, metrics = step(*args)
        return state, FlatMetrics(tuple(metrics.values()), tuple(metrics))

    return run
