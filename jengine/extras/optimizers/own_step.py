"""A model's own training step: `train_step(state, batch, ctx) -> (state, metrics)`, and the
parts that `ctx` has.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax import Updates

from jengine.config import paths
from jengine.data.batch_check import Batch
from jengine.model.adapters import to_loss_dict
from jengine.model.model import Model
from jengine.optim.gradients import loss_names
from jengine.optim.transforms.fields import get_field
from jengine.optim.transforms.loss_scale import LossScaleState
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import AnyWrapper
from jengine.train import phases as parts
from jengine.train.kept_types import keep_types
from jengine.train.model_attributes import hyperparams_as_attributes
from jengine.train.phases import Constrain, Gather, Metrics, Phase, PhaseConfig
from jengine.train.state import TrainState
from jengine.train.traced_hooks import StepContext, TracedHooks

PyTree = Any
LossFn = Callable[[PyTree], Any]  # params -> losses, or (losses, model_state)
Combine = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
# Within a model's own step, the entry of `hook_state` with the decision of hooks on the update,
# bool[]; it is part of the state because `ctx.apply` may be called in a loop of JAX.
_APPLY = "apply_update"
_SHARED_STREAM = 0x73686172  # apart from the keys of a single device, and from small numbers


class LossGradients(NamedTuple):
    """Result of `UpdateContext.gradients`."""

    grads: Updates  # like the parameters, of this replica's examples; zeros for frozen parameters
    metrics: Metrics  # the losses, f32[] by name, with the total as 'loss' (or 'loss_<optimizer>')
    model_state: PyTree  # the new one
    weight: jax.Array | None  # f32[], the weight in a mean over replicas; None for equal weights


@dataclasses.dataclass(frozen=True)
class UpdateContext:
    """What a model's own `train_step` can use besides the state and the batch.

    Methods take a state and return a new one, so they also work in loops of JAX (`lax.scan`).
    `optimizer` is a name if there are several optimizers, and is left out for a single one.

    >>> import optax
    >>> from jengine.model.functional import FunctionalModel
    >>> from jengine.train.step import build_train_step
    >>> from jengine.train.state import create_train_state
    >>> def train_step(state, batch, ctx):
    ...     for _ in range(2):  # two updates with one batch
    ...         state, metrics = ctx.update(state, lambda params: (params["w"] - batch) ** 2)
    ...     return state, metrics
    >>> model = FunctionalModel(lambda: {"w": jnp.zeros(())}, train_step=train_step)
    >>> wrapper = OptimWrapper(optax.sgd(0.25))
    >>> state = create_train_state(
    ...     *model.init(jax.random.key(0), None), wrapper, rng=jax.random.key(0)
    ... )
    >>> state, metrics = jax.jit(build_train_step(model, wrapper))(
    ...     state, jnp.array(4.0), wrapper.hyperparams
    ... )
    >>> state.params["w"].item(), metrics["loss"].item()
    (3.0, 4.0)

    Attributes:
      batch: the batch, as `train_step` gets it: `ctx.update` leaves out the examples that its mask
        marks as padding.
      rng: key<fry>[], of this iteration, and of this replica; see `fold_in`.
      shared_rng: key<fry>[], of this iteration, the same on all replicas and on any number of them:
        for noise that is added to a sum over replicas.
      hyperparams: f32 arrays by name: those of the optimizers, and those that hooks have set.
      optimizers: the optimizer wrappers by name, '' for a single one.
      axis_name: the replicas' mapped axis, None without one; see `mean` and `sum`.
    """

    batch: Batch
    rng: jax.Array
    shared_rng: jax.Array
    hyperparams: Mapping[str, Any]
    optimizers: Mapping[str, OptimWrapper]
    axis_name: str | None
    _hooks: TracedHooks
    _constrain: Constrain
    _gather_tables: Gather
    _combine: Combine = lambda params, model_state: (params, model_state)
    _update_state: Callable[[PyTree, PyTree], PyTree] = lambda old, new: new

    def with_modules(
        self, combine: Combine, update_state: Callable[[PyTree, PyTree], PyTree]
    ) -> "UpdateContext":
        """Return a context whose loss functions get modules, or other trees, in the place of
        parameters.

        Args:
          combine: `(params, model_state) -> (module, module's state)`.
          update_state: `(model_state, module's new state) -> model_state`.
        """
        return dataclasses.replace(self, _combine=combine, _update_state=update_state)

    def fold_in(self, data: int | jax.Array) -> "UpdateContext":
        """Return a context with other keys, for one of several updates.

        Hooks derive their keys from it.
        """
        rng, shared_rng = (jax.random.fold_in(key, data) for key in (self.rng, self.shared_rng))
        return dataclasses.replace(self, rng=rng, shared_rng=shared_rng)

    def gradients(self, state: TrainState, loss_fn: LossFn, optimizer: str = "") -> LossGradients:
        """Differentiate a loss at `state.params`, with respect to the parameters that the optimizer
        trains.

        The network computes in the precision of the optimizer wrapper; gradients are unscaled if it
        has a loss scale.

        Args:
          state: the state.
          loss_fn: `params -> losses`, an array or a dict by name, as the loss of a
            `FunctionalModel`; or `params -> (losses, model_state)` for a model with a state.
          optimizer: see `UpdateContext`.
        """
        ctx = self._differentiate(state, self._phase(state, loss_fn, optimizer))
        scale = self._loss_scale(state, optimizer)
        grads = (
            ctx.grads
            if scale is None
            else jax.tree.map(lambda g: g / scale.astype(g.dtype), ctx.grads)
        )
        return LossGradients(grads, OrderedDict(ctx.metrics), ctx.model_state, ctx.loss_weight)

    def apply(
        self,
        state: TrainState,
        grads: Updates,
        metrics: Mapping[str, jax.Array] | None = None,
        optimizer: str = "",
        weight: jax.Array | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Run the hooks' `traced_grads` and update the parameters with gradients of any origin.

        Args:
          state, optimizer: as for `gradients`.
          grads: unscaled gradients, like the parameters; those of replicas are averaged. Without
            replicas also those of single examples, for an optimizer such as `optax.contrib.dpsgd`.
          metrics: the metrics so far, which hooks see: `NumericsGuardHook` looks at the losses.
          weight: f32[], the weight of these gradients in a mean over replicas, as in
            `LossGradients`.

        Returns:
          The new state, and the metrics with those of the optimizer and of hooks, such as
          'grad_norm'.

        Raises:
          ValueError: gradients of single examples on replicas, whose mean would mix examples.
        """
        if self.replicas > 1:
            shapes = paths.flatten(state.params)
            for path, grad in paths.flatten(grads).items():
                if path in shapes and jnp.shape(grad) != jnp.shape(shapes[path]):
                    raise ValueError(
                        f"`grads` must have the shapes of the parameters on replicas, got "
                        f"{jax.typeof(grad).str_short()} for {path!r}; clip gradients of single "
                        "examples and add them up in the step, with `ctx.sum`"
                    )
        phase = Phase(optimizer, self._wrapper(optimizer), _no_loss)
        if (scale := self._loss_scale(state, optimizer)) is not None:
            # The wrapper divides by the scale again, so gradients that were computed without it
            # would be too small.
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        # Sharded as the parameters: otherwise XLA may keep a replicated copy of all gradients.
        grads = self._constrain(grads, "params.")
        ctx = self._context(state).replace(
            grads=grads, loss_weight=weight, metrics=OrderedDict(metrics or {})
        )
        return self._finish(state, phase, ctx, has_loss=False)

    def update(
        self, state: TrainState, loss_fn: LossFn, optimizer: str = ""
    ) -> tuple[TrainState, Metrics]:
        """Make one ordinary update: `gradients` and `apply` in one.

        Return the new state and all metrics.
        """
        phase = self._phase(state, loss_fn, optimizer)
        return self._finish(state, phase, self._differentiate(state, phase))

    def mean(self, tree: PyTree) -> PyTree:
        """Return the mean over replicas of `DataParallel`.

        The tree itself elsewhere, where there is one batch.
        """
        return tree if self.axis_name is None else jax.lax.pmean(tree, self.axis_name)

    def sum(self, tree: PyTree) -> PyTree:
        """Return the sum over replicas of `DataParallel`.

        The tree itself elsewhere, where there is one batch. `apply` takes the mean of its gradients
        over replicas, which leaves a sum as it is.
        """
        return tree if self.axis_name is None else jax.lax.psum(tree, self.axis_name)

    @property
    def replicas(self) -> int:
        """The number of replicas, each with a batch of its own; 1 except in `DataParallel`."""
        return 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)

    def _wrapper(self, optimizer: str) -> OptimWrapper:
        if optimizer not in self.optimizers:
            names = (
                " or ".join(map(repr, self.optimizers)) if "" not in self.optimizers else "left out"
            )
            raise ValueError(f"`optimizer` must be {names}, got {optimizer!r}")
        return self.optimizers[optimizer]

    def _phase(self, state: TrainState, loss_fn: LossFn, optimizer: str) -> Phase:
        def loss(
            params: PyTree, model_state: PyTree, batch: Batch, **_: Any
        ) -> tuple[Mapping[str, Any], PyTree]:
            outputs = loss_fn(self._combine(params, model_state)[0])
            losses = outputs
            if type(outputs) is tuple:  # a NamedTuple may be the losses
                losses, new_state = outputs
                model_state = self._update_state(model_state, new_state)
            return to_loss_dict(losses), model_state

        return Phase(optimizer, self._wrapper(optimizer), loss)

    def _context(self, state: TrainState) -> StepContext:
        return StepContext(
            step=state.step,
            rng=self.rng,
            batch=self.batch,
            hyperparams=self.hyperparams,
            params=state.params,
            model_state=state.model_state,
            opt_state=state.opt_state,
            old_params=state.params,
            axis_name=self.axis_name,
        )

    def _differentiate(self, state: TrainState, phase: Phase) -> StepContext:
        return parts.differentiate(
            phase, self._context(state), self._constrain, self._gather_tables
        )

    def _finish(
        self, state: TrainState, phase: Phase, ctx: StepContext, has_loss: bool = True
    ) -> tuple[TrainState, Metrics]:
        ctx, hook_state = self._hooks.run("traced_grads", ctx, state.hook_state)
        ctx = parts.update(phase, ctx, state.model_state, has_loss)
        # All updates of a step count together: one that was dropped makes the step one that hooks
        # must not trust.
        if _APPLY in hook_state and ctx.apply_update is not None:
            hook_state = {**hook_state, _APPLY: hook_state[_APPLY] & ctx.apply_update}
        new_state = state.replace(
            params=ctx.params,
            model_state=ctx.model_state,
            opt_state=ctx.opt_state,
            hook_state=hook_state,
        )
        return new_state, OrderedDict(ctx.metrics)

    def _loss_scale(self, state: TrainState, optimizer: str) -> jax.Array | None:
        opt_state = state.opt_state[optimizer] if optimizer else state.opt_state
        return get_field(opt_state, LossScaleState, "loss_scale")


def _no_loss(*_: Any, **__: Any) -> Any:
    raise TypeError(
        "ctx.apply has gradients without a loss; an optimizer with a line search requires "
        "ctx.update"
    )


class OwnStep(NamedTuple):
    """The `train_step` of a model, between `traced_batch` and `traced_update`."""

    model: Model
    optim_wrapper: AnyWrapper
    optimizers: Mapping[str, OptimWrapper]
    constrain: Constrain
    gather_tables: Gather

    def run(
        self,
        state: TrainState,
        ctx: StepContext,
        hook_state: Mapping[str, PyTree],
        hooks: TracedHooks,
    ) -> tuple[StepContext, Mapping[str, PyTree]]:
        """Call the model; return the context with the new variables and metrics, and the new hook
        states.

        Raises:
          ValueError: a state that has changed, see `keep_types`; metrics that are not scalars, or
            none with 'loss' in the name.
        """
        decides = hooks.have("traced_grads") or ctx.apply_update is not None
        # Present from the start: a loop of JAX keeps the structure of its carry
        flag = (
            {_APPLY: jnp.ones((), bool) if ctx.apply_update is None else ctx.apply_update}
            if decides
            else {}
        )
        given = state.replace(hook_state={**hook_state, **flag})
        with hyperparams_as_attributes(self.model, ctx.hyperparams, self.optim_wrapper):
            update_ctx = UpdateContext(
                ctx.batch,
                ctx.rng,
                jax.random.fold_in(jax.random.fold_in(state.key, _SHARED_STREAM), state.step),
                ctx.hyperparams,
                self.optimizers,
                ctx.axis_name,
                hooks,
                self.constrain,
                self.gather_tables,
            )
            new_state, metrics = self.model.train_step(given, ctx.batch, update_ctx)
        new_state = keep_types(given, new_state, "")
        metrics = OrderedDict(
            (name, jnp.asarray(value, jnp.result_type(float))) for name, value in metrics.items()
        )
        for name, value in metrics.items():
            if value.shape:
                raise ValueError(
                    f"train_step must return scalars as metrics, got the shape {value.shape} for "
                    f"{name!r}"
                )
        if "loss" not in metrics:  # the sum of the losses, to which loss scales do not belong
            scales = {f"loss_scale_{name}" if name else "loss_scale" for name in self.optimizers}
            losses = {name: x for name, x in metrics.items() if name not in scales}
            metrics["loss"] = sum(losses[name] for name in loss_names(losses))
        if ctx.axis_name is not None:  # what the model has computed itself belongs to one replica
            metrics = jax.lax.pmean(metrics, ctx.axis_name)
        hook_state = dict(new_state.hook_state)
        apply_update = hook_state.pop(_APPLY, None)
        new_ctx = ctx.replace(
            params=new_state.params,
            model_state=new_state.model_state,
            opt_state=new_state.opt_state,
            metrics=metrics,
            apply_update=apply_update,
        )
        return new_ctx, hook_state


def build_own_step(
    model: Model,
    optim_wrapper: AnyWrapper,
    phases: Sequence[PhaseConfig] | None,
    constrain: Constrain,
    gather_tables: Gather,
) -> Callable[..., tuple[StepContext, Mapping[str, PyTree]]]:
    """Return `OwnStep.run` for a model with a `train_step`.

    Raises:
      ValueError: phases, which the model's step would not see.
    """
    if phases is not None:
        raise ValueError(
            "phases must be None for a model with its own `train_step`, which calls its "
            f"optimizers itself, got {list(phases)}"
        )
    optimizers = optim_wrapper if isinstance(optim_wrapper, Mapping) else {"": optim_wrapper}
    model = parts.apply_precision(model, optim_wrapper)
    return OwnStep(model, optim_wrapper, optimizers, constrain, gather_tables).run
