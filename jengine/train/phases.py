"""Training step phases: one optimizer each, with the loss that it minimizes."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from optax import OptState

from jengine.config.annotations import Count, check_values
from jengine.config.errors import ConfigError, closest, config_path
from jengine.data.batch_check import Batch
from jengine.model.model import Model
from jengine.model.precision import CastModel, Precision
from jengine.optim.transforms.loss_scale import all_finite
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict
from jengine.train.kept_types import keep_types
from jengine.train.losses import example_weight, loss_weight, mean_over_replicas, total_loss
from jengine.train.micro_batches import Part, differentiate_in_parts
from jengine.train.model_attributes import reads_attributes
from jengine.train.traced_hooks import StepContext

PyTree = Any
Metrics = OrderedDict[str, jax.Array]  # JAX sorts the keys of a dict
Constrain = Callable[[PyTree, str], PyTree]
Gather = Callable[[PyTree], PyTree]
# ('critic', 5), or the fields of `PhaseSettings`
PhaseConfig: TypeAlias = tuple[str, int] | Mapping[str, Any]


class PhaseSettings(NamedTuple):
    """Entry in `train_cfg.phases`.

    Attributes:
      optimizer: the optimizer's name.
      steps: updates per iteration.
      every: the phase acts in the iterations `every`, 2 * `every`, ... in the run.
      batches: 'each' takes a batch from the loader for each update; 'shared' uses the newest one
        that an earlier phase in the iteration has taken, or the iteration's first.
    """

    optimizer: str
    steps: Count = 1
    every: Count = 1
    batches: Literal["shared", "each"] = "shared"


class Phase(NamedTuple):
    """One optimizer update in the training step."""

    name: str  # '' for a single optimizer
    optim_wrapper: OptimWrapper
    # (params, model_state, batch, *, rng, hyperparams) -> (losses, model_state)
    loss: Callable[..., Any]
    every: int = 1  # acts every n iterations
    batch: int = 0  # index among the batches of an iteration
    micro_batches: int = 1  # parts of the batch, of which each device computes one at a time


def parse_phases(phases: Sequence[PhaseConfig] | None) -> list[PhaseSettings] | None:
    """Parse the training loop `phases`.

    >>> parse_phases([("disc", 2), dict(optimizer="gen", every=3)])[1]
    PhaseSettings(optimizer='gen', steps=1, every=3, batches='shared')

    Raises:
      ConfigError: an unknown field or value, no phase, or a phase that takes batches but does not
        always act.
    """
    if phases is None:
        return None
    parsed = []
    for index, phase in enumerate(phases):
        with config_path("phases", index):
            fields = (
                dict(zip(("optimizer", "steps"), phase, strict=False))
                if isinstance(phase, tuple | list)
                else dict(phase)
            )
            check_values("", PhaseSettings, fields)
            settings = PhaseSettings(**fields)
            # The loader must be asked for as many batches in each iteration, whatever the device
            # will use.
            if settings.batches == "each" and settings.every > 1:
                raise ConfigError(
                    f"`every` must be 1 with batches='each', got {settings.every}: each iteration "
                    "of a run takes the same number of batches from the loader"
                )
            parsed.append(settings)
    # An iteration that trains nothing would still count for schedules and logs.
    if all(phase.every > 1 for phase in parsed):
        raise ConfigError("`phases` must have a phase that acts in each iteration, got none")
    return parsed


def batches_per_iteration(phases: Sequence[PhaseConfig] | None) -> int:
    """Return how many batches an iteration takes from the loader.

    >>> batches_per_iteration([dict(optimizer="critic", steps=5, batches="each"), ("generator", 1)])
    5
    """
    return 1 + _batch_indices(parse_phases(phases) or [])[-1][-1] if phases else 1


def count_iterations(length: int | None, batches_per_iteration: int) -> int:
    """Return the iterations in a pass over `length` batches, if each takes several."""
    if length is None or length < batches_per_iteration:
        got = "data without a length" if length is None else f"{length} in a pass"
        raise ConfigError(
            "`train_cfg.epoch_length` must be given unless a pass has the "
            f"{batches_per_iteration} batches of an iteration, got {got}"
        )
    return length // batches_per_iteration


def _batch_indices(phases: Sequence[PhaseSettings]) -> list[list[int]]:
    """Return the batch index for each update in each phase."""
    taken = 0
    indices = []
    for phase in phases:
        if phase.batches == "each":
            indices.append(list(range(taken, taken + phase.steps)))
            taken += phase.steps
        else:
            # A first phase with the same batch for all steps takes one; later ones share the batch
            # that was taken last.
            taken = max(taken, 1)
            indices.append([taken - 1] * phase.steps)
    return indices


def build_phases(
    model: Model,
    optim_wrapper: OptimWrapper | OptimWrapperDict,
    phases: Sequence[PhaseConfig] | None,
    micro_batches: int = 1,
) -> list[Phase]:
    """Return a step's updates in order; a phase with several updates is repeated.

    Raises:
      ValueError: a phase that is not an optimizer name, or phases for a single optimizer.
    """
    if not isinstance(optim_wrapper, Mapping):
        if phases is not None:
            raise ValueError(f"phases must be None for a single optimizer, got {list(phases)}")
        loss = apply_precision(model, optim_wrapper).loss
        loss = reads_attributes(loss, model, optim_wrapper)
        return [Phase("", optim_wrapper, loss, micro_batches=micro_batches)]
    settings = (
        [PhaseSettings(name) for name in optim_wrapper]
        if phases is None
        else parse_phases(phases) or []
    )
    built = []
    for (name, _, every, _), batches in zip(settings, _batch_indices(settings), strict=True):
        if name not in optim_wrapper:
            raise ValueError(
                f"phases must name optimizers, got {name!r}{closest(name, optim_wrapper)}"
            )
        loss = functools.partial(apply_precision(model, optim_wrapper[name]).phase_loss, name)
        loss = reads_attributes(loss, model, optim_wrapper)
        built += [Phase(name, optim_wrapper[name], loss, every, batch) for batch in batches]
    return built


def apply_precision(model: Model, optim_wrapper: OptimWrapper | OptimWrapperDict) -> Model:
    """Return the model in the wrapper's compute dtype, if it has one."""
    dtype = getattr(optim_wrapper, "dtype", None)  # of an `AmpOptimWrapper`
    return model if dtype is None else CastModel(model, Precision(compute=dtype))


# --- The parts of a phase, pure functions of the context ---


def differentiate(
    phase: Phase, ctx: StepContext, constrain: Constrain, gather_tables: Gather
) -> StepContext:
    """Add the losses, the new model state and the gradients to the context."""
    wrapper = phase.optim_wrapper
    is_averaged = wrapper.accumulates or wrapper.axis_name is not None or phase.micro_batches > 1
    opt_state = ctx.opt_state[phase.name] if phase.name else ctx.opt_state

    def differentiate_batch(
        batch: Batch, model_state: PyTree, rng: jax.Array
    ) -> tuple[Part, PyTree]:
        def loss_fn(params: PyTree) -> tuple[jax.Array, Part]:
            params = gather_tables(params)
            losses, state = phase.loss(
                params, model_state, batch, rng=rng, hyperparams=ctx.hyperparams
            )
            total, metrics = total_loss(losses, batch)
            state = keep_types(model_state, state, "model_state.")
            return total, (metrics, state, loss_weight(losses, batch) if is_averaged else None)

        (_, part), grads = wrapper.value_and_grad(loss_fn, has_aux=True)(ctx.params, opt_state)
        return part, grads

    whole = ctx.batch, ctx.model_state, ctx.rng
    if phase.micro_batches == 1:
        (metrics, model_state, weight), grads = differentiate_batch(*whole)
    else:
        count = phase.micro_batches
        axis = wrapper.axis_name
        (metrics, model_state, weight), grads = differentiate_in_parts(
            differentiate_batch, *whole, count, axis
        )
    if wrapper.axis_name is not None:
        metrics = mean_over_replicas(metrics, weight, wrapper.axis_name)
    if weight is None and wrapper.accumulates:  # batches of a window may have several sizes
        weight = example_weight(ctx.batch)
    # Otherwise XLA may choose other shardings, for instance because of a branch that does not use
    # the gradients.
    grads = constrain(grads, "params.")
    if phase.name:
        metrics = OrderedDict(
            (f"loss_{phase.name}" if k == "loss" else k, v) for k, v in metrics.items()
        )
    return ctx.replace(
        model_state=model_state, grads=grads, loss_weight=weight, metrics={**ctx.metrics, **metrics}
    )


def update(
    phase: Phase, ctx: StepContext, old_model_state: PyTree, has_loss: bool = True
) -> StepContext:
    """Apply the phase's optimizer to the parameters.

    `has_loss` is False for gradients with unknown origin: optax line searches receive no loss then.
    """
    name = phase.name
    wrapper = phase.optim_wrapper
    opt_state = ctx.opt_state
    hyperparams = ctx.hyperparams
    if name:  # hyperparameters of hooks, such as `frozen:PATTERN`, are for all optimizers
        shared = {
            key: value for key, value in hyperparams.items() if not isinstance(value, Mapping)
        }
        opt_state = opt_state[name]
        hyperparams = {**hyperparams[name], **shared}

    def local_value(params: PyTree) -> tuple[jax.Array, jax.Array | None]:
        losses, _ = phase.loss(
            params, old_model_state, ctx.batch, rng=ctx.rng, hyperparams=ctx.hyperparams
        )
        return total_loss(losses, ctx.batch)[0], None if wrapper.axis_name is None else loss_weight(
            losses, ctx.batch
        )

    def mean(tree: PyTree, weight: jax.Array | None) -> PyTree:
        return (
            tree
            if wrapper.axis_name is None
            else mean_over_replicas(tree, weight, wrapper.axis_name)
        )

    def value_and_grad(params: PyTree) -> tuple[jax.Array, PyTree]:
        if (axis := wrapper.axis_name) is not None:  # as in `value_and_trainable_grad`
            params = jax.tree.map(lambda p: jax.lax.pcast(p, axis, to="varying"), params)
        (value, weight), grads = jax.value_and_grad(local_value, has_aux=True)(params)
        return mean((value, grads), weight)

    # With its own derivative: that of a mean over replicas would be each replica's own, with which
    # line searches, which differentiate the value, decide differently on each replica and wait for
    # each other forever.
    mean_value = jax.custom_vjp(lambda params: mean(*local_value(params)))
    mean_value.defvjp(
        value_and_grad,
        lambda grads, change: (jax.tree.map(lambda g: change.astype(g.dtype) * g, grads),),
    )

    def value_fn(params: PyTree, grad_fn: object = None, obj_fn: object = None) -> jax.Array:
        """Return the total loss as a function of the parameters alone, for line searches, and
        `obj_fn` for `sophia`.

        Line searches refuse extra arguments that this function does not take, such as `grad_fn`.
        """
        return mean_value(params)

    def grad_fn(params: PyTree, _: int = 0) -> PyTree:
        """Return the gradients at other parameters, for `optax.contrib.sam` in its opaque mode."""
        return value_and_grad(params)[1]

    # functions of the loss at other parameters cost nothing if the optimizer does not call them
    value = ctx.metrics[f"loss_{name}" if name else "loss"] if has_loss else None
    loss = (
        dict(value=value, value_fn=value_fn, grad_fn=grad_fn, obj_fn=value_fn) if has_loss else {}
    )
    params, new_opt_state = wrapper.apply_gradients(
        ctx.grads,
        opt_state,
        ctx.params,
        hyperparams,
        ctx.loss_weight,
        is_added=wrapper.accumulates,
        grad=ctx.grads,
        **loss,
    )
    new_opt_state = keep_types(
        opt_state, new_opt_state, f"opt_state.{name}." if name else "opt_state."
    )
    model_state = ctx.model_state
    finite = wrapper.is_finite(new_opt_state)
    # after an overflow the model state is kept as well
    if finite is not None and not wrapper.accumulates:
        model_state = _select(finite, model_state, old_model_state)
    metrics = {
        f"{key}_{name}" if name else key: value
        for key, value in wrapper.metrics(opt_state, new_opt_state).items()
    }
    return ctx.replace(
        params=params,
        model_state=model_state,
        opt_state={**ctx.opt_state, name: new_opt_state} if name else new_opt_state,
        metrics={**ctx.metrics, **metrics},
    )


def accumulate(phase: Phase, ctx: StepContext, old_model_state: PyTree) -> StepContext:
    """Add the gradients to the accumulator.

    An update does this too before it begins: in a chunk the sum is then outside the branch, within
    which XLA would round it differently than in a single step.
    """
    opt_state = phase.optim_wrapper.accumulate(ctx.grads, ctx.opt_state, ctx.loss_weight)
    model_state = ctx.model_state
    if phase.optim_wrapper.is_finite(opt_state) is not None and jax.tree.leaves(model_state):
        # The decision on the update comes too late: it is one for the whole window. A replica's
        # gradients may overflow where the batch's do not, so the statistics themselves decide.
        floats = [x for x in jax.tree.leaves(model_state) if jnp.issubdtype(x.dtype, jnp.floating)]
        model_state = _select(all_finite(floats), model_state, old_model_state)
    return ctx.replace(opt_state=opt_state, model_state=model_state)


def is_updated(
    optim_wrapper: OptimWrapper | OptimWrapperDict, opt_state: OptState
) -> jax.Array | None:
    """Return whether some optimizer's last update was applied, bool[].

    None where none is ever skipped.
    """
    if isinstance(optim_wrapper, OptimWrapper):
        return optim_wrapper.is_finite(opt_state)
    pairs = [(wrapper, opt_state[name]) for name, wrapper in optim_wrapper.items()]
    finite = [wrapper.is_finite(state) for wrapper, state in pairs]
    known = [flag for flag in finite if flag is not None]
    # An optimizer without a loss scale always updates, so that the step has updated something.
    return jnp.any(jnp.stack(known)) if len(known) == len(finite) else None


def _select(condition: jax.Array, then: PyTree, otherwise: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), then, otherwise)
