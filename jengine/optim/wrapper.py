"""Optimizer wrapper: an optax chain with the interface that MMEngine's training loop uses."""

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax import OptState, Updates

from jengine.config.registry import OPTIM_WRAPPERS
from jengine.data.step_values import StepCount, parse_step_values
from jengine.optim.gradients import value_and_trainable_grad
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.optimizers.optimizer_builder import build_optimizer
from jengine.optim.param_groups.grouped import GroupedOptimizer
from jengine.optim.param_groups.param_group import get_momentum
from jengine.optim.schedules.chain import ScheduleChain, chain_of
from jengine.optim.transforms.accumulate import (
    AccumulateState,
    accumulate_gradients,
    init_accumulation,
    sum_gradients,
)
from jengine.optim.transforms.clip import (
    ClipByNorm,
    ClipByNormState,
    clipping_parts,
    parse_clip_grad,
)
from jengine.optim.transforms.fields import get_field


@OPTIM_WRAPPERS.register_module()
class OptimWrapper:
    """Optimizer wrapper with an optax chain, `tx`, and the hyperparameters of the parameter groups.

    `tx` does all computation and can be used like any optax transformation. From the outside to the
    inside it has: the group hyperparameters, kept in the state; accumulation and the mean over
    replicas; loss scaling (`AmpOptimWrapper`); and a chain of named parts: clipping, weight decay,
    the optimizer and the learning rate. `update`, `accumulate` and the other methods call it as a
    training loop does.

    >>> import jax.numpy as jnp
    >>> from jengine.optim.optimizers.sgd import SGD
    >>> wrapper, params = (
    ...     OptimWrapper(SGD(lr=0.5), clip_grad=dict(max_norm=1.0)),
    ...     {"w": jnp.array([3.0, 4.0])},
    ... )
    >>> state = wrapper.init(params)
    >>> loss, grads = wrapper.value_and_grad(lambda p: jnp.sum(p["w"] ** 2))(params, state)
    >>> params, state = wrapper.apply_gradients(grads, state, params)
    >>> loss.item(), wrapper.metrics(state, state)["grad_norm"].item()
    (25.0, 10.0)

    Args:
      optimizer: an `Optimizer` such as `SGD(lr=0.1)`, its config, or an optax gradient
        transformation.
      accumulative_counts: iterations per update, which uses the mean gradient; `StepValues` for a
        number that changes. A window that a change or the end of the run cuts short has the mean of
        the iterations that it has.
      clip_grad: `dict(max_norm=, norm_type=2)`, `dict(clip_value=)` or None.
      accumulation_weight: how a window of accumulated gradients is averaged: 'examples' by the real
        examples in each batch, as one large batch; 'equal' gives each iteration the same weight, as
        MMEngine, also a partial batch.
      axis_name: mapped axis of a `jax.pmap` or `jax.shard_map` around `value_and_grad` and
        `update`, which take replicated parameters; gradients are averaged over it, once per update.

    Attributes:
      param_groups: the groups; hyperparameters may be set at any time between two steps.
      inner_count: iterations counted so far.
      counts: iterations per update, as a function of the iteration.
      base_param_settings: with more than one group, an extra group with the optimizer's own
        settings, which schedulers update too: it has the learning rate without any multiplier.

    Raises:
      ArgumentError: accumulative_counts under 1, or an empty clip_grad. TypeError, ValueError: see
        `parse_clip_grad`.
    """

    schedule_chain: ScheduleChain | None = None  # its schedules, see `chain_of`
    # changes the initial parameters, see `paramwise_cfg.parametrization`
    rescale: Callable[[Any], Any] | None = None

    def __init__(
        self,
        optimizer: Optimizer
        | optax.GradientTransformation
        | optax.MultiSteps
        | Mapping[str, Any]
        | str,
        accumulative_counts: StepCount = 1,
        clip_grad: Mapping[str, Any] | None = None,
        *,
        axis_name: str | None = None,
        accumulation_weight: Literal["examples", "equal"] = "examples",
    ) -> None:
        self.optimizer = build_optimizer(optimizer)
        self.grouped = GroupedOptimizer(self.optimizer)
        self.param_groups = self.grouped.param_groups
        self.base_param_settings = self.grouped.base_param_settings
        self.clip_grad = parse_clip_grad(clip_grad)
        self.axis_name = axis_name
        self.counts = parse_step_values(accumulative_counts)
        self.accumulates = max(self.counts.values) > 1
        self.accumulation_weight = accumulation_weight
        self.inner_count = 0
        self._max_count: int | float = -1  # unknown: no window is shorter

    @functools.cached_property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The chain that the wrapper runs.

        `update(grads, state, params)` takes these optional extra arguments:

        * hyperparams: values by name that replace those in `state.hyperparams`, see
          `OptimWrapper.hyperparams`.
        * is_last, weight: see `accumulate_gradients`.
        * value, grad, value_fn and others: for optimizers of optax that take them.
        """
        return self._build_chain(max(self.counts.values))

    def _build_chain(self, every: int) -> optax.GradientTransformationExtraArgs:
        """Return the chain that updates every `every` iterations."""
        # Clipping is a part before the optimizer, so it sees unscaled mean gradients. Accumulation
        # is outermost: the loss scale decides once per update, over the sum of the window.
        return self.grouped.transformation(
            clipping_parts(self.clip_grad),
            lambda chain: accumulate_gradients(
                self._add_loss_scaling(chain), every, self.axis_name
            ),
        )

    def _add_loss_scaling(
        self, chain: optax.GradientTransformationExtraArgs
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain with loss scaling, which a plain wrapper does not have."""
        return chain

    # -------------------- inputs of the step

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The optimizer's settings, the defaults of every parameter group."""
        return self.optimizer.defaults

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The current group hyperparameters, which should be passed to the compiled step.

        They are float32[], or float32[G] for G groups: `learning_rate`, `weight_decay`, …
        """
        return self.grouped.hyperparams()

    @property
    def param_settings(self) -> dict[str, dict[str, Any]]:
        """The current parameter settings, by dotted path.

        {} before `init`, unless built with parameters.
        """
        return self.grouped.param_settings()

    def learning_rate_multipliers(self, params: Any) -> Any:
        """Return each parameter's learning rate divided by the optimizer's.

        They are float32[] in a tree like `params`, 0 for frozen parameters; for a parameter whose
        layers are in several groups, an array that broadcasts against it.
        """
        base = (self.base_param_settings or self.param_groups[0])["lr"]
        return self.grouped.map_groups(params, lambda group: group["lr"] / base)

    def weight_decays(self, params: Any) -> Any:
        """Return each parameter's weight decay, like `learning_rate_multipliers`."""
        return self.grouped.map_groups(params, operator.itemgetter("weight_decay"))

    def decay_mask(self, params: Any) -> Any:
        """Return which parameters decay, for the `mask` of `optax.add_decayed_weights`.

        Raises:
          ValueError: only some layers of a stacked parameter decay.
        """
        return jax.tree.map(_is_decayed, self.weight_decays(params))

    # -------------------- pure: runs in the compiled step

    def init(self, params: Any) -> OptState:
        """Return the initial state of `tx` for a pytree of floating arrays.

        Raises:
          TypeError: a trainable leaf that is not floating. ValueError: groups that do not fit the
            parameters.
        """
        self.grouped.bind(params)
        return self.tx.init(params)

    def value_and_grad(
        self, loss_fn: Callable[..., Any], has_aux: bool = False
    ) -> Callable[..., Any]:
        """Return `jax.value_and_grad` with respect to the trainable parameters.

        Args:
          loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`. For a loss
            that is a dict, the entries whose names contain 'loss' are summed, as in MMEngine.
          has_aux: see loss_fn.

        Returns:
          `(params, opt_state, *args, **kwargs) -> (loss or (loss, aux), grads)`. With loss scaling,
          the gradients are scaled and the loss is not. For frozen parameters they are zeros, not
          computed.
        """

        def value_and_grad(
            params: Any, opt_state: OptState, *args: Any, **kwargs: Any
        ) -> tuple[Any, Updates]:
            return value_and_trainable_grad(
                lambda params: self._call_loss(loss_fn, params, args, kwargs),
                params,
                self.grouped.layout(params),
                has_aux=has_aux,
                scale_loss=lambda loss: self._scale_loss(loss, opt_state),
                axis_name=self.axis_name,
            )

        return value_and_grad

    def accumulate(
        self, grads: Updates, opt_state: OptState, weight: jax.Array | None = None
    ) -> OptState:
        """Add gradients to the window, without an update; the arguments are those of `update`.

        Raises:
          ValueError: the wrapper does not accumulate gradients.
        """
        if not self.accumulates:
            raise ValueError(
                "`accumulative_counts` must be above 1 for OptimWrapper.accumulate, got 1"
            )
        return self.tx.update(
            grads, opt_state, None, is_last=False, weight=self._window_weight(weight)
        )[1]

    def _window_weight(self, weight: jax.Array | None) -> jax.Array | None:
        """Return the weight of an iteration's gradients in a window.

        Replicas always count by their examples.
        """
        if weight is None or not self.accumulates or self.accumulation_weight == "examples":
            return weight
        return None if self.axis_name is None else weight / jax.lax.psum(weight, self.axis_name)

    def update(
        self,
        grads: Updates,
        opt_state: OptState,
        params: Any | None = None,
        hyperparams: Mapping[str, Any] | None = None,
        weight: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Any, OptState]:
        """Compute the update that ends an accumulation window: add the accumulated gradients,
        divide, clip and step.

        Args:
          grads: gradients from `value_and_grad`.
          opt_state: the state.
          params: the parameters.
          hyperparams: the value of `self.hyperparams`. An entry `frozen:PATTERN` that is not 0
            freezes the parameters whose path contains PATTERN for this step; other names are
            ignored. None: those in `param_groups`; while tracing, which would make them constants,
            those in the state.
          weight: float32[], the weight of these gradients in the mean over the window and over
            replicas: for a mean loss over sentences, the number of words. None: all have the same
            weight.
          **extra: for optimizers of optax: `value`, `grad`, `value_fn`.

        Returns:
          The updates, to be added by `optax.apply_updates`, exact zeros for frozen parameters; and
          the new state.
        """
        # Values read in a trace would stay in the program, and schedules would have no effect.
        if hyperparams is None and not any(
            isinstance(g, jax.core.Tracer) for g in jax.tree.leaves(grads)
        ):
            hyperparams = self.hyperparams
        return self.tx.update(
            grads,
            opt_state,
            params,
            hyperparams=hyperparams,
            is_last=True,
            weight=self._window_weight(weight),
            **extra,
        )

    def apply_gradients(
        self,
        grads: Updates,
        opt_state: OptState,
        params: Any,
        hyperparams: Mapping[str, Any] | None = None,
        weight: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Any, OptState]:
        """Call `update` and `optax.apply_updates`; return the new parameters and the new state."""
        updates, opt_state = self.update(grads, opt_state, params, hyperparams, weight, **extra)
        return optax.apply_updates(params, updates), opt_state

    def metrics(self, before: OptState, after: OptState) -> dict[str, jax.Array]:
        """Return the metrics for the log from the states before and after an update.

        They are `grad_norm`, float32[], the norm before clipping, if gradients are clipped by norm.
        """
        if not isinstance(self.clip_grad, ClipByNorm):
            return {}
        return {"grad_norm": get_field(after, ClipByNormState, "grad_norm")}

    def is_finite(self, opt_state: OptState) -> jax.Array | None:
        """Return whether the last update was applied, bool[]; None if updates are never skipped."""
        return None

    def _scale_loss(self, loss: jax.Array, opt_state: OptState) -> jax.Array:
        return loss

    def _call_loss(
        self, loss_fn: Callable[..., Any], params: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        return loss_fn(params, *args, **kwargs)

    # -------------------- host: counting, hyperparameters, checkpoints

    def initialize_count_status(self, init_counts: int, max_counts: int | float) -> None:
        """Set the training progress, so that the last accumulation window ends with the run and no
        gradient is lost.

        Args:
          init_counts: iterations already done.
          max_counts: total iterations; -1 or `math.inf` if unknown.
        """
        self.inner_count = init_counts
        self._max_count = max_counts

    def start_step(self, step: int | None = None) -> bool:
        """Count one iteration before its step runs.

        Return whether it updates or only accumulates gradients.

        You should read `hyperparams` afterwards. `step` is the number of iterations before this
        one; None for one more than at the last call.
        """
        self.inner_count = count = (self.inner_count if step is None else step) + 1
        return not self.accumulates or self._is_update(count)

    def should_update(self) -> bool:
        """Return whether the current iteration, the last one counted, updates the parameters."""
        return self._is_update(self.inner_count)

    def should_sync(self) -> bool:
        """Return whether the next iteration updates the parameters, so that replicas must
        exchange gradients.
        """
        return self._is_update(self.inner_count + 1)

    def _is_update(self, count: int) -> bool:
        step = count - 1
        every = self.counts.at(step)
        # The last window before a change, and that of the run, may be shorter.
        is_full = (count - self.counts.start(step)) % every == 0
        return is_full or count in (self.counts.next_change(step), self._max_count)

    def count_updates(self, iters: int) -> int:
        """Return the number of updates in the first `iters` iterations, with one for a window
        that is cut short.
        """
        edges = [0, *(start for start in self.counts.milestones if start < iters), iters]
        return sum(
            math.ceil((stop - start) / self.counts.at(start))
            for start, stop in itertools.pairwise(edges)
        )

    @property
    def accumulative_counts(self) -> int:
        """Iterations per update at the current iteration."""
        return self.counts.at(max(self.inner_count - 1, 0))

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rates: `lr` for the groups, preceded by `base_lr` when there is
        more than one group.
        """
        # an optax transformation with none or a hidden one
        if self.optimizer.defaults.get("lr") is None:
            return {}
        base = self.base_param_settings
        return {
            **({} if base is None else {"base_lr": [base["lr"]]}),
            "lr": [group["lr"] for group in self.param_groups],
        }

    def set_lr(self, lr: float) -> None:
        """Set the optimizer's learning rate from the next step on; groups keep their multipliers.

        A schedule goes on from it, see `ScheduleChain`.
        """
        chain_of(self).set_value("lr", lr)

    def set_hyperparam(self, name: str, value: float) -> None:
        """Set a value in `hyperparams`, such as `learning_rate` or `b1`, as `set_lr` does."""
        setting, index = self.grouped.find_setting(name)
        if index is None:
            chain_of(self).set_value(setting, float(value))
            return
        for group in chain_of(self).groups:
            group[setting] = (*group[setting][:index], float(value), *group[setting][index + 1 :])

    def get_momentum(self) -> dict[str, list[float]]:
        """Return the momentum of each group: `momentum`, else the first of `betas`, else `b1`,
        else 0.
        """
        if not self.defaults:  # an optax transformation, whose hyperparameters are hidden
            return {}
        return {"momentum": [get_momentum(group) for group in self.param_groups]}

    def group_table(self, with_roles: bool = False) -> tuple[list[str], list[list[str]]]:
        """Return the parameter groups as a table: column names, and rows of strings once
        parameters are known; with their roles if asked for, for which the model may be traced.
        """
        return self.grouped.table(with_roles)

    def group_state_dict(self) -> dict[str, Any]:
        """Return all group settings as JSON-compatible values."""
        return self.grouped.state_dict()

    def load_group_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the settings in a `group_state_dict`.

        Raise ValueError for another number of groups.

        What has a schedule keeps the value that the schedule gives.
        """
        self.grouped.load_state_dict(state_dict)
        if self.schedule_chain is not None:
            self.schedule_chain.refresh()

    def state_dict(self, opt_state: OptState) -> dict[str, Any]:
        """Return `state` (arrays), `param_groups` and, with more than one group,
        `base_param_settings`.
        """
        return {"state": opt_state, **self.group_state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any], opt_state: OptState) -> OptState:
        """Restore a `state_dict` from a run with the same config.

        Args:
          state_dict: the result of `state_dict`.
          opt_state: the current state, for the structure.

        Raises:
          ValueError: a different structure or number of groups.
        """
        # of another structure it is refused here
        saved = jax.tree.map(lambda old, new: new, opt_state, state_dict["state"])
        self.load_group_state_dict(state_dict)
        return saved

    # -------------------- one call per iteration, without a Runner

    def update_params(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        opt_state: OptState,
        *args: Any,
        hyperparams: Mapping[str, Any] | None = None,
        has_aux: bool = False,
    ) -> tuple[Any, OptState, Any]:
        """Run one training iteration: compute gradients, then update or, within an accumulation
        window, add them.

        It counts iterations, so you should call it from Python, not inside a compiled function. The
        computation is compiled once per `loss_fn`.

        Args:
          loss_fn, params, opt_state, has_aux: see `value_and_grad`.
          *args: for `loss_fn`, after the parameters; pytrees of arrays.
          hyperparams: replace those in `param_groups` for this iteration.

        Returns:
          The new parameters, the new state, and the output of `loss_fn`.
        """
        is_update = self.start_step()
        # Read here, outside of the compiled function: in a trace they would become constants.
        hyperparams = {**self.hyperparams, **(hyperparams or {})}
        return self._compile_iteration(loss_fn, has_aux, is_update)(
            params, opt_state, hyperparams, args
        )

    @functools.lru_cache(maxsize=16)  # noqa: B019 - a wrapper lives as long as its training
    def _compile_iteration(
        self, loss_fn: Callable[..., Any], has_aux: bool, is_update: bool
    ) -> Callable[..., Any]:
        value_and_grad = self.value_and_grad(loss_fn, has_aux)

        # Not donated: MMEngine's `update_params` is called from users' own loops, which may keep
        # the old parameters.
        @jax.jit
        def run_iteration(
            params: Any, opt_state: OptState, hyperparams: Any, args: Any
        ) -> tuple[Any, OptState, Any]:
            outputs, grads = value_and_grad(params, opt_state, *args)
            # Decided by the host, which counts: two programs, and no branch on the device.
            if not is_update:
                return params, self.accumulate(grads, opt_state), outputs
            return *self.apply_gradients(grads, opt_state, params, hyperparams), outputs

        return run_iteration

    def backward(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        opt_state: OptState,
        *args: Any,
        has_aux: bool = False,
    ) -> tuple[OptState, Any]:
        """Accumulate the gradients of `loss_fn(params, *args)`.

        Return the new state and the output of `loss_fn`.
        """
        self.start_step()
        if not isinstance(opt_state.inner_state, AccumulateState):
            # A wrapper that does not accumulate has no room for gradients until `backward` is
            # called.
            trainable = self.grouped.layout(params).trainable(params)
            opt_state = opt_state._replace(
                inner_state=init_accumulation(trainable, opt_state.inner_state)
            )
        outputs, grads = self.value_and_grad(loss_fn, has_aux)(params, opt_state, *args)
        chain = self._build_chain(every=2)  # any number above 1: `is_last` is False
        return chain.update(grads, opt_state, None, is_last=False)[1], outputs

    def step(
        self, params: Any, opt_state: OptState, hyperparams: Mapping[str, Any] | None = None
    ) -> tuple[Any, OptState]:
        """Clip the gradient sum from `backward` and update with it.

        The sum is not divided and not cleared.

        Returns:
          The new parameters and state; unchanged if `backward` was not called.
        """
        window = opt_state.inner_state
        if not isinstance(window, AccumulateState):
            return params, opt_state
        hyperparams = self.hyperparams if hyperparams is None else hyperparams
        layout = self.grouped.layout(params)
        # The sums are of trainable parameters; the chain takes gradients of all.
        grads = layout.combine(
            sum_gradients(window, self.axis_name), jax.tree.map(jnp.zeros_like, params)
        )
        state = opt_state._replace(inner_state=window.inner_state)
        updates, state = self._build_chain(every=1).update(
            grads, state, params, hyperparams=hyperparams
        )
        new_state = state._replace(inner_state=window._replace(inner_state=state.inner_state))
        return optax.apply_updates(params, updates), new_state

    def zero_grad(self, opt_state: OptState) -> OptState:
        """Clear the accumulated gradients."""
        window = opt_state.inner_state
        if not isinstance(window, AccumulateState):
            return opt_state
        # At 0 the sums count as invalid, so that no zeros have to be written.
        return opt_state._replace(
            inner_state=window._replace(num_accumulated=jnp.zeros((), jnp.int32))
        )

    @contextlib.contextmanager
    def optim_context(self, model: Any = None) -> Iterator[bool]:
        """Surround the forward pass, as in MMEngine.

        Yield whether this iteration updates, and do nothing else.

        Without low precision nothing else is necessary: within an accumulation window replicas
        exchange nothing.
        """
        yield self.should_sync()

    def autocast(self, apply_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `apply_fn` unchanged.

        An `AmpOptimWrapper` wraps it to compute in low precision.
        """
        return apply_fn

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copies and pickles, without the chains, which refer to these
        groups.
        """
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("tx", "schedule_chain")
        }

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.optimizer.name}, {len(self.param_groups)} groups, "
            f"accumulative_counts={self.accumulative_counts}, clip_grad={self.clip_grad})"
        )


def _is_decayed(decays: jax.Array) -> bool:
    flags = {bool(decay) for decay in decays.flatten()}
    if len(flags) > 1:
        raise ValueError(
            "for a mask, either all layers of a stacked parameter decay or none; some of them do"
        )
    return flags.pop()
