"""The optimizer wrapper: from gradients to parameter updates, one interface for every strategy.

`update` is the whole of it as a pure function: add what was accumulated, divide, clip, step. The numbers that a
schedule moves are in `param_groups`, on the host; `hyperparams` hands them to a compiled step as data.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.optim import freeze
from jengine.optim.as_optax import as_optax
from jengine.optim.clip import ClipByNorm, clipping, parse_clip_grad
from jengine.optim.core import Optimizer, Tree, state_dtype, step_zero, zeros_like
from jengine.optim.counting import Accumulation
from jengine.optim.grouped import GroupedOptimizer
from jengine.optim.optimizers.optax_named import from_optax
from jengine.optim.state import OptState, add_to_accumulator, add_to_weight_sum, scale_by_weight
from jengine.registry import OPTIM_WRAPPERS, OPTIMIZERS

_LEAST = 1e-12  # weights add up to 0 only where nothing counts, and then the gradients are 0 too


@OPTIM_WRAPPERS.register_module()
class OptimWrapper:
    """Optimizer, parameter groups, gradient accumulation and clipping behind one interface.

    Args:
      optimizer: an `Optimizer` such as `SGD(lr=0.1)`, its config, or an optax gradient transformation (whose
        updates the group's lr, 1.0 at first, multiplies).
      accumulative_counts: iterations whose mean gradient makes one update.
      clip_grad: `dict(max_norm=, norm_type=2)`, `dict(clip_value=)` or None.
      axis_name: the mapped axis of a `jax.pmap` or `jax.shard_map` around `value_and_grad` and `update`, which take
        replicated parameters; gradients are averaged over it, once an update.

    Attributes:
      param_groups: the groups; their numbers may be set at any time between two steps.
      base_param_settings: with more than one group, a group of the optimizer's own settings that schedulers move
        along: the learning rate without any multiplier.

    Raises:
      AssertionError: accumulative_counts under 1, or an empty clip_grad. TypeError, ValueError: see `parse_clip_grad`.
    """

    def __init__(
        self,
        optimizer: Optimizer | optax.GradientTransformation | Mapping[str, Any],
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        *,
        axis_name: str | None = None,
    ) -> None:
        if isinstance(optimizer, optax.GradientTransformation):
            optimizer = from_optax(optimizer)
        elif not isinstance(optimizer, Optimizer):
            optimizer = OPTIMIZERS.build(optimizer)
        self.grouped = GroupedOptimizer(optimizer)
        self.param_groups = self.grouped.param_groups
        self.base_param_settings = self.grouped.base_param_settings
        self.clip_grad = parse_clip_grad(clip_grad)
        self.axis_name = axis_name
        self._accumulation = Accumulation(accumulative_counts)

    # ------------------------------------------------------------------ what the step takes

    @property
    def accumulative_counts(self) -> int:
        """Iterations whose mean gradient makes one update."""
        return self._accumulation.counts

    @property
    def accumulates(self) -> bool:
        """Whether some iterations only accumulate gradients."""
        return self.accumulative_counts > 1

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The numbers of all groups as a compiled step takes them, read anew at each access.

        Returns:
          Name -> float32[G] over the groups (a list of G scalars when there are more than 64); with accumulation
          also `accumulation_divisor`, float32[]: the divisor of the summed gradients of the current window.
        """
        numbers = self.grouped.numbers()
        if self.accumulative_counts > 1:
            numbers["accumulation_divisor"] = self.grouped.number(self._accumulation.window_size())
        return numbers

    @property
    def param_settings(self) -> dict[str, dict[str, Any]]:
        """The settings in force for each parameter, by dotted path; empty until the parameters are known."""
        return self.grouped.param_settings()

    # ------------------------------------------------------------------ pure: runs in the compiled step

    def init(self, params: Tree) -> OptState:
        """The state before the first update.

        Args:
          params: pytree of floating arrays.

        Raises:
          TypeError: a trainable leaf that is not floating. ValueError: groups that do not fit the parameters.
        """
        trainable = self.grouped.layout(params).trainable(params)
        return OptState(
            count=step_zero(),
            inner=self.grouped.init(params),
            accumulated_grads=zeros_like(trainable) if self.accumulative_counts > 1 else None,
            loss_scale=None,
            metrics={name: jnp.zeros((), jnp.float32) for name in self._metric_names()},
            num_accumulated=step_zero() if self.accumulates else None,
            weight_sum=jnp.zeros((), jnp.float32) if self.accumulative_counts > 1 else None,
        )

    def value_and_grad(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        """`jax.value_and_grad` with respect to the trainable parameters.

        Args:
          loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`.
          has_aux: see loss_fn.

        Returns:
          `(params, opt_state, *args, **kwargs) -> (loss or (loss, aux), grads)`. Under loss scaling the gradients are
          those of the scaled loss, the loss is not scaled. Gradients of frozen parameters are zeros, not computed.
        """

        def value_and_grad(params: Tree, opt_state: OptState, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
            """The value as it is, and the gradients of the scaled loss."""
            layout = self.grouped.layout(params)

            def scaled(trainable: Tree) -> tuple[jax.Array, Any]:
                out = self._call(loss_fn, layout.fill(trainable, params), args, kwargs)
                loss = out[0] if has_aux else out
                return self._scale_loss(loss, opt_state), (loss, out[1] if has_aux else None)

            trainable = layout.trainable(params)
            if self.axis_name is not None:
                # else jax.shard_map sums the gradients of replicated parameters over the replicas by itself
                trainable = jax.tree.map(lambda p: jax.lax.pcast(p, self.axis_name, to="varying"), trainable)
            (_, (loss, aux)), grads = jax.value_and_grad(scaled, has_aux=True)(trainable)
            grads = layout.fill(grads, jax.tree.map(jnp.zeros_like, params))
            return ((loss, aux) if has_aux else loss), grads

        return value_and_grad

    def accumulate(self, grads: Tree, opt_state: OptState, weight: jax.Array | None = None) -> OptState:
        """The iteration that only adds its gradients to `opt_state.accumulated_grads`.

        Args:
          grads: gradients as `value_and_grad` gives them.
          opt_state: the state.
          weight: see `update`.
        """
        if opt_state.accumulated_grads is None or opt_state.num_accumulated is None:
            raise ValueError("nothing accumulates here: build the wrapper with accumulative_counts above 1")
        summed = add_to_accumulator(opt_state, scale_by_weight(self.grouped.known_layout().trainable(grads), weight))
        return opt_state._replace(
            accumulated_grads=summed,
            num_accumulated=opt_state.num_accumulated + 1,
            weight_sum=add_to_weight_sum(opt_state, weight),
        )

    def update(
        self,
        grads: Tree,
        opt_state: OptState,
        params: Tree,
        hyperparams: Mapping[str, Any] | None = None,
        weight: jax.Array | None = None,
    ) -> tuple[Tree, OptState]:
        """The iteration that updates: adds what was accumulated, divides, clips, and steps.

        Args:
          grads: gradients as `value_and_grad` gives them.
          opt_state: the state.
          params: the parameters.
          hyperparams: what `self.hyperparams` gave. An entry `frozen:PATTERN` that is not 0 freezes the parameters
            whose path contains PATTERN for this step; others are ignored. None: the numbers of this moment, which a
            trace would keep.
          weight: float32[], what these gradients count with in the mean over the window and over replicas: for the mean
            loss of a batch of sentences, its number of words. None: as much as any other.

        Returns:
          The updates, to be added by `optax.apply_updates`, exact zeros for frozen parameters; and the new state.
        """
        layout = self.grouped.layout(params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        outcome = _Outcome(lambda u: layout.fill(u, zeros), None)
        return self._update(grads, opt_state, params, hyperparams, outcome, weight)

    def apply_gradients(
        self,
        grads: Tree,
        opt_state: OptState,
        params: Tree,
        hyperparams: Mapping[str, Any] | None = None,
        weight: jax.Array | None = None,
    ) -> tuple[Tree, OptState]:
        """`update` and `optax.apply_updates` in one, which spares memory when an update may be skipped.

        Args:
          grads: as for `update`, like the others.
          opt_state: the state.
          params: the parameters.
          hyperparams: what `self.hyperparams` gave.
          weight: as for `update`.

        Returns:
          The new parameters and the new state.
        """
        return self._update(grads, opt_state, params, hyperparams, self._added_to(params), weight)

    def _added_to(self, params: Tree) -> "_Outcome":
        layout = self.grouped.layout(params)

        def add(updates: Tree) -> Tree:
            return layout.fill(optax.apply_updates(layout.trainable(params), updates), params)

        return _Outcome(add, params)

    def _update(
        self,
        grads: Tree,
        opt_state: OptState,
        params: Tree,
        hyperparams: Mapping[str, Any] | None,
        outcome: "_Outcome",
        weight: jax.Array | None,
    ) -> tuple[Tree, OptState]:
        hyperparams = self.hyperparams if hyperparams is None else hyperparams
        grads = self.grouped.layout(params).trainable(grads)
        grads = scale_by_weight(jax.tree.map(lambda g: g.astype(state_dtype(g.dtype)), grads), weight)
        if opt_state.accumulated_grads is not None:
            grads = add_to_accumulator(opt_state, grads)
            weight = None if weight is None else add_to_weight_sum(opt_state, weight)
        if self.accumulative_counts > 1 and weight is None:
            grads = jax.tree.map(lambda g: g / hyperparams["accumulation_divisor"], grads)
        if opt_state.accumulated_grads is not None:
            # the sums are no longer needed; keep these gradients there, because zeros would have to be written
            opt_state = opt_state._replace(accumulated_grads=grads, num_accumulated=step_zero())
        return self._step(grads, opt_state, params, hyperparams, outcome, weight)

    def _step(
        self,
        grads: Tree,
        opt_state: OptState,
        params: Tree,
        hyperparams: Mapping[str, Any],
        outcome: "_Outcome",
        weight: jax.Array | None = None,
    ) -> tuple[Tree, OptState]:
        """Everything after accumulation, on trainable gradients; `weight` is what they have still to be divided by."""
        if self.axis_name is not None:
            grads, weight = jax.lax.pmean((grads, weight), self.axis_name)
        if weight is not None:
            divisor = jnp.maximum(weight, _LEAST)
            grads = jax.tree.map(lambda g: g / divisor.astype(g.dtype), grads)
        frozen = freeze.flags(self.grouped.layout(params), hyperparams)
        if frozen is not None:
            grads = freeze.mask(grads, frozen)
        return self._clip_and_step(grads, opt_state, params, hyperparams, outcome)

    def _clip_and_step(
        self, grads: Tree, opt_state: OptState, params: Tree, hyperparams: Mapping[str, Any], outcome: "_Outcome"
    ) -> tuple[Tree, OptState]:
        clip, metrics = clipping(grads, self.clip_grad)
        updates, inner = self.grouped.update(clip(grads), opt_state.inner, params, hyperparams)
        return outcome.of(updates), opt_state._replace(count=opt_state.count + 1, inner=inner, metrics=metrics)

    def _metric_names(self) -> tuple[str, ...]:
        return ("grad_norm",) if isinstance(self.clip_grad, ClipByNorm) else ()

    def _scale_loss(self, loss: jax.Array, opt_state: OptState) -> jax.Array:
        return loss

    def _call(self, loss_fn: Callable[..., Any], params: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return loss_fn(params, *args, **kwargs)

    def as_optax(self) -> optax.GradientTransformationExtraArgs:
        """The same training as a plain optax chain, see `jengine.optim.as_optax.as_optax`."""
        return as_optax(self.grouped, self.clip_grad, self.accumulative_counts, lambda: self.hyperparams)

    # ------------------------------------------------------------------ host: counting, numbers, checkpoints

    def initialize_count_status(self, init_counts: int, max_counts: int) -> None:
        """Says where training stands, so that the last window of accumulation is closed.

        Args:
          init_counts: iterations done before.
          max_counts: iterations in all; -1 if unknown.
        """
        self._accumulation.initialize(init_counts, max_counts)

    @property
    def inner_count(self) -> int:
        """Iterations counted so far."""
        return self._accumulation.done

    def start_step(self, step: int | None = None) -> bool:
        """Count one iteration before its step runs. Read `hyperparams` after it: they then belong to this iteration.

        Args:
          step: number of iterations before this one; None for one more than at the last call.

        Returns:
          True if the step updates the parameters, False if it only accumulates gradients.
        """
        return self._accumulation.start_step(step)

    def should_update(self) -> bool:
        """Whether the iteration counted last updates the parameters."""
        return self._accumulation.is_update(self.inner_count)

    def should_sync(self) -> bool:
        """Whether the next iteration to be counted updates, so that replicas must exchange gradients."""
        return self._accumulation.is_update(self.inner_count + 1)

    def get_lr(self) -> dict[str, list[float]]:
        """Learning rates: `lr` of each group, preceded by `base_lr` when there is more than one group."""
        lr = [group["lr"] for group in self.param_groups]
        return (
            {"lr": lr} if self.base_param_settings is None else {"base_lr": [self.base_param_settings["lr"]], "lr": lr}
        )

    def get_momentum(self) -> dict[str, list[float]]:
        """The momentum of each group: `momentum`, else the first of `betas`, else 0."""
        return {"momentum": [g["momentum"] if "momentum" in g else g.get("betas", (0,))[0] for g in self.param_groups]}

    def group_table(self) -> tuple[list[str], list[list[str]]]:
        """The parameter groups as a table: column names and rows of strings; no rows until parameters are known."""
        return self.grouped.table()

    def group_state_dict(self) -> dict[str, Any]:
        """The numbers of all groups, as JSON can hold them."""
        return self.grouped.state_dict()

    def load_group_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Puts the numbers of a `group_state_dict` in force.

        Raises:
          ValueError: it has another number of groups.
        """
        self.grouped.load_state_dict(state_dict)

    def state_dict(self, opt_state: OptState) -> dict[str, Any]:
        """Everything: `state` (arrays), `param_groups` and, with more than one group, `base_param_settings`."""
        names = ("count", "inner", "accumulated_grads", "num_accumulated", "weight_sum")
        state = {name: getattr(opt_state, name) for name in names}
        return {"state": state, **self.group_state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any], opt_state: OptState) -> OptState:
        """Puts a `state_dict` in force.

        Args:
          state_dict: what `state_dict` returned, here or in a run with the same config.
          opt_state: the state of this run; gives the structure.

        Raises:
          ValueError: another structure or another number of groups.
        """
        saved = state_dict["state"]
        mine = {name: getattr(opt_state, name) for name in saved}
        found, expected = str(jax.tree.structure(saved)), str(jax.tree.structure(mine))
        if found != expected:
            raise ValueError(f"the saved optimizer state is {found}, expected {expected}")
        self.load_group_state_dict(state_dict)
        return opt_state._replace(**saved)

    # ------------------------------------------------------------------ one call an iteration, outside any Runner

    def update_params(
        self,
        loss_fn: Callable[..., Any],
        params: Tree,
        opt_state: OptState,
        *args: Any,
        hyperparams: Mapping[str, Any] | None = None,
        has_aux: bool = False,
    ) -> tuple[Tree, OptState, Any]:
        """One training iteration: gradients, then an update or, inside an accumulation window, their addition.

        It counts, so it is called from Python, not from inside a compiled function; what it runs is compiled once for
        each `loss_fn`.

        Args:
          loss_fn: see `value_and_grad`.
          params: the parameters.
          opt_state: the state.
          *args: for `loss_fn`, after the parameters; pytrees of arrays.
          hyperparams: the numbers of this iteration; None: those of `param_groups`.
          has_aux: see `value_and_grad`.

        Returns:
          The new parameters, the new state, and what `loss_fn` returned.
        """
        updates = self.start_step()
        numbers = {**self.hyperparams, **(hyperparams or {})}
        return self._iteration(loss_fn, has_aux, updates)(params, opt_state, numbers, args)

    @functools.lru_cache(maxsize=16)  # noqa: B019 - a wrapper lives as long as its training
    def _iteration(self, loss_fn: Callable[..., Any], has_aux: bool, updates: bool) -> Callable[..., Any]:
        value_and_grad = self.value_and_grad(loss_fn, has_aux)

        @jax.jit
        def iteration(params: Tree, opt_state: OptState, numbers: Any, args: Any) -> tuple[Tree, OptState, Any]:
            out, grads = value_and_grad(params, opt_state, *args)
            if not updates:
                return params, self.accumulate(grads, opt_state), out
            return *self.apply_gradients(grads, opt_state, params, numbers), out

        return iteration

    def backward(
        self, loss_fn: Callable[..., Any], params: Tree, opt_state: OptState, *args: Any, has_aux: bool = False
    ) -> tuple[OptState, Any]:
        """Adds the gradients of `loss_fn(params, *args)` to those at hand, and counts one iteration; never steps.

        Returns:
          The new state and what `loss_fn` returned.
        """
        self.start_step()
        if opt_state.accumulated_grads is None:
            zeros = zeros_like(self.grouped.layout(params).trainable(params))
            opt_state = opt_state._replace(
                accumulated_grads=zeros, num_accumulated=step_zero(), weight_sum=jnp.zeros((), jnp.float32)
            )
        out, grads = self.value_and_grad(loss_fn, has_aux)(params, opt_state, *args)
        return self.accumulate(grads, opt_state), out

    def step(
        self, params: Tree, opt_state: OptState, hyperparams: Mapping[str, Any] | None = None
    ) -> tuple[Tree, OptState]:
        """Clips the gradients that `backward` summed and steps on them, as they are: nothing is divided or cleared.

        Returns:
          The new parameters and state; without a `backward` before, the old ones.
        """
        if opt_state.accumulated_grads is None:
            return params, opt_state
        numbers = self.hyperparams if hyperparams is None else hyperparams
        grads = add_to_accumulator(opt_state, jax.tree.map(jnp.zeros_like, opt_state.accumulated_grads))
        return self._step(grads, opt_state, params, numbers, self._added_to(params))

    def zero_grad(self, opt_state: OptState) -> OptState:
        """Clears the summed gradients."""
        if opt_state.num_accumulated is None:
            return opt_state
        return opt_state._replace(num_accumulated=step_zero())

    @contextlib.contextmanager
    def optim_context(self, model: Any = None) -> Iterator[bool]:
        """Surrounds the forward pass, as in MMEngine; gives whether this iteration's gradients will be used at once.

        Nothing needs switching here: what accumulates is a program without an exchange of gradients, and the compute
        dtype belongs to `autocast`.
        """
        yield self.should_sync()

    def autocast(self, apply_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `apply_fn` as it is; an `AmpOptimWrapper` wraps it to compute in its low precision."""
        return apply_fn

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.grouped.optimizer.name}, {len(self.param_groups)} groups, "
            f"accumulative_counts={self.accumulative_counts}, clip_grad={self.clip_grad})"
        )


class _Outcome(NamedTuple):
    """What a step is to return of its updates."""

    of: Callable[[Tree], Tree]  # trainable updates -> result
    unchanged: Tree  # the result of a skipped step; None: `of` zeros
