"""Wrap an optax chain with what a training loop of MMEngine calls."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jengine.annotations import Count
from jengine.optim.accumulation import Accumulation
from jengine.optim.optimizers.build import build_optimizer
from jengine.optim.optimizers.common import Parts, Tree
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.param_groups.grouped import GroupedOptimizer
from jengine.optim.transforms import ClipByNormState, accumulate_gradients, clip_by_norm, get_field
from jengine.optim.transforms.accumulate import AccumulateState, init_accumulation, sum_of_window
from jengine.optim.transforms.clip import ClipByNorm, ClipByValue, parse_clip_grad
from jengine.registry import OPTIM_WRAPPERS

OptState = Any  # the state of `OptimWrapper.tx`, a pytree


@OPTIM_WRAPPERS.register_module()
class OptimWrapper:
    """Hold an optax chain, `tx`, and the numbers of its parameter groups.

    `tx` is all that the wrapper runs, from the outside to the inside: the numbers of the groups, kept in the state;
    accumulation and the mean over replicas; loss scaling (`AmpOptimWrapper`); then clipping, weight decay, the
    optimizer and the learning rate, a chain of named parts. It works wherever optax is used. `update`, `accumulate` and
    the others call it as a training loop does.

    Args:
      optimizer: an `Optimizer` such as `SGD(lr=0.1)`, its config, or an optax gradient transformation.
      accumulative_counts: iterations whose mean gradient makes one update.
      clip_grad: `dict(max_norm=, norm_type=2)`, `dict(clip_value=)` or None.
      axis_name: mapped axis of a `jax.pmap` or `jax.shard_map` around `value_and_grad` and `update`, which take
        replicated parameters; gradients are averaged over it, once an update.

    Attributes:
      tx: the chain.
      optimizer: the optimizer.
      param_groups: the groups; their numbers may be set at any time between two steps.
      base_param_settings: with more than one group, a group of the optimizer's own settings that schedulers move
        along: the learning rate without any multiplier.

    Raises:
      AssertionError: accumulative_counts under 1, or an empty clip_grad. TypeError, ValueError: see `parse_clip_grad`.
    """

    def __init__(
        self,
        optimizer: Optimizer | optax.GradientTransformation | optax.MultiSteps | Mapping[str, Any] | str,
        accumulative_counts: Count = 1,
        clip_grad: Mapping[str, Any] | None = None,
        *,
        axis_name: str | None = None,
    ) -> None:
        self.optimizer = build_optimizer(optimizer)
        self.grouped = GroupedOptimizer(self.optimizer)
        self.param_groups = self.grouped.param_groups
        self.base_param_settings = self.grouped.base_param_settings
        self.clip_grad = parse_clip_grad(clip_grad)
        self.axis_name = axis_name
        self._accumulation = Accumulation(accumulative_counts)

    @functools.cached_property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The chain that the wrapper runs.

        `update(grads, state, params)` takes these extra arguments, none of which is needed:
          hyperparams: numbers by name in the place of those in `state.hyperparams`, see `OptimWrapper.hyperparams`.
          is_last, weight, divisor: see `accumulate_gradients`.
          value, grad, value_fn and others: for optimizers of optax that take them.
        """
        return self._transformation(self.accumulative_counts)

    @functools.cached_property
    def _tx_of_mean(self) -> optax.GradientTransformationExtraArgs:
        """The chain without accumulation."""
        return self._transformation(1)

    def _transformation(self, every: int) -> optax.GradientTransformationExtraArgs:
        def wrap(chain: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
            return accumulate_gradients(self._skipping(chain), every, self.axis_name)

        return self.grouped.transformation(_clipping(self.clip_grad), wrap)

    def _skipping(self, chain: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
        """Return the chain with what decides whether it runs at all."""
        return chain

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
    def defaults(self) -> Mapping[str, Any]:
        """The settings of the optimizer that a parameter group starts from."""
        return self.optimizer.defaults

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The numbers of all groups as a compiled step takes them, read anew at each access.

        Returns:
          By name a float32[], or float32[G] where there are several groups: `learning_rate`, `weight_decay`, …; with
          accumulation also `accumulation_divisor`, float32[], divides the summed gradients of the current window.
        """
        numbers = self.grouped.numbers()
        if self.accumulates:
            numbers["accumulation_divisor"] = self.grouped.number(self._accumulation.window_size())
        return numbers

    @property
    def param_settings(self) -> dict[str, dict[str, Any]]:
        """The settings in force for each parameter, by dotted path; {} until the parameters are known."""
        return self.grouped.param_settings()

    def learning_rate_multipliers(self, params: Tree) -> Tree:
        """Return the learning rate of each parameter over that of the optimizer, as the rules set it.

        Args:
          params: the parameters.

        Returns:
          A tree of float32[] like the parameters, 0 for frozen ones; for a parameter whose layers are in several groups
          an array that broadcasts against it.

        Raises:
          ValueError: the learning rate is 0 or not known.
        """
        base = (self.base_param_settings or self.param_groups[0]).get("lr")
        if not base:
            raise ValueError(f"`optimizer.lr` must be above 0 for multipliers of it, got {base}")
        return self._by_leaf(params, lambda group: group["lr"] / base)

    def weight_decays(self, params: Tree) -> Tree:
        """Return the weight decay of each parameter, in the form of `learning_rate_multipliers`.

        Raises:
          ValueError: the optimizer has none that is known.
        """
        if "weight_decay" not in self.defaults:
            raise ValueError(f"`optimizer.weight_decay` must be known, got {self.optimizer.name} without one")
        return self._by_leaf(params, lambda group: group["weight_decay"])

    def decay_mask(self, params: Tree) -> Tree:
        """Return which parameters decay, as the `mask` of `optax.add_decayed_weights` takes it.

        Raises:
          ValueError: the layers of one parameter differ, which a mask cannot say.
        """
        decays = self.weight_decays(params)
        return jax.tree.map(_all_or_none, decays)

    def _by_leaf(self, params: Tree, number: Callable[[Mapping[str, Any]], float]) -> Tree:
        layout = self.grouped.layout(params)
        numbers = np.asarray([number(group) for group in self.param_groups], np.float32)
        found = layout.spread({"number": jnp.asarray(numbers if len(numbers) > 1 else numbers[0])}, params)["number"]
        if len(numbers) == 1:
            found = layout.trainable(jax.tree.map(lambda _: found, params))
        return layout.fill(found, jax.tree.map(lambda _: jnp.float32(0), params))

    # ------------------------------------------------------------------ pure: runs in the compiled step

    def init(self, params: Tree) -> OptState:
        """Return the state before the first update, that of `tx`.

        Args:
          params: pytree of floating arrays.

        Raises:
          TypeError: a trainable leaf that is not floating. ValueError: groups that do not fit the parameters.
        """
        self.grouped.bind(params)
        return self.tx.init(params)

    def value_and_grad(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        """Return `jax.value_and_grad` with respect to the trainable parameters.

        Args:
          loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`. A loss that is a dict counts
            as the sum of the entries whose names contain 'loss', as in MMEngine.
          has_aux: see loss_fn.

        Returns:
          `(params, opt_state, *args, **kwargs) -> (loss or (loss, aux), grads)`. Under loss scaling the gradients are
          those of the scaled loss, the loss is not scaled. Gradients of frozen parameters are zeros, not computed.
        """

        def value_and_grad(params: Tree, opt_state: OptState, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
            """Return the value as it is, and the gradients of the scaled loss."""
            layout = self.grouped.layout(params)

            def scaled(trainable: Tree) -> tuple[jax.Array, Any]:
                out = self._call(loss_fn, layout.fill(trainable, params), args, kwargs)
                loss = out[0] if has_aux else out
                return self._scale_loss(_sum_of_losses(loss), opt_state), (loss, out[1] if has_aux else None)

            trainable = layout.trainable(params)
            if self.axis_name is not None:
                # else jax.shard_map sums the gradients of replicated parameters over the replicas by itself
                trainable = jax.tree.map(lambda p: jax.lax.pcast(p, self.axis_name, to="varying"), trainable)
            (_, (loss, aux)), grads = jax.value_and_grad(scaled, has_aux=True)(trainable)
            grads = layout.fill(grads, jax.tree.map(jnp.zeros_like, params))
            return ((loss, aux) if has_aux else loss), grads

        return value_and_grad

    def accumulate(self, grads: Tree, opt_state: OptState, weight: jax.Array | None = None) -> OptState:
        """Run an iteration that only adds its gradients to those of the window.

        Args:
          grads: gradients as `value_and_grad` gives them.
          opt_state: the state.
          weight: see `update`.
        """
        if not self.accumulates:
            raise ValueError("OptimWrapper.accumulate needs accumulative_counts above 1, got 1")
        return self.tx.update(grads, opt_state, None, is_last=False, weight=weight)[1]

    def update(
        self,
        grads: Tree,
        opt_state: OptState,
        params: Tree | None = None,
        hyperparams: Mapping[str, Any] | None = None,
        weight: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Tree, OptState]:
        """Run an iteration that updates: add what was accumulated, divide, clip and step.

        Args:
          grads: gradients as `value_and_grad` gives them.
          opt_state: the state.
          params: the parameters.
          hyperparams: what `self.hyperparams` returned. An entry `frozen:PATTERN` that is not 0 freezes the parameters
            whose path contains PATTERN for this step; others are ignored. None: outside of a trace the numbers of
            `param_groups`; in a trace, which would keep those of its moment, the numbers in the state.
          weight: float32[], the weight of these gradients in the mean over the window and over replicas: for the mean
            loss of a batch of sentences, its number of words. None: all weigh the same.
          **extra: for optimizers of optax: `value`, `grad`, `value_fn`.

        Returns:
          The updates, to be added by `optax.apply_updates`, exact zeros for frozen parameters; and the new state.
        """
        if hyperparams is None and not any(isinstance(g, jax.core.Tracer) for g in jax.tree.leaves(grads)):
            hyperparams = self.hyperparams
        divisor = (hyperparams or {}).get("accumulation_divisor")
        return self.tx.update(
            grads, opt_state, params, hyperparams=hyperparams, is_last=True, weight=weight, divisor=divisor, **extra
        )

    def apply_gradients(
        self,
        grads: Tree,
        opt_state: OptState,
        params: Tree,
        hyperparams: Mapping[str, Any] | None = None,
        weight: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Tree, OptState]:
        """Run `update` and `optax.apply_updates`; return the new parameters and the new state."""
        updates, opt_state = self.update(grads, opt_state, params, hyperparams, weight, **extra)
        return optax.apply_updates(params, updates), opt_state

    def metrics(self, before: OptState, after: OptState) -> dict[str, jax.Array]:
        """Return what the log shows of an update.

        Args:
          before: the state before it.
          after: the state after it.

        Returns:
          `grad_norm`, float32[], the norm before clipping, where gradients are clipped by norm.
        """
        if not isinstance(self.clip_grad, ClipByNorm):
            return {}
        return {"grad_norm": get_field(after, ClipByNormState, "grad_norm")}

    def is_finite(self, opt_state: OptState) -> jax.Array | None:
        """Return whether the last update was applied, bool[]; None where none is ever skipped."""
        return None

    def _scale_loss(self, loss: jax.Array, opt_state: OptState) -> jax.Array:
        return loss

    def _call(self, loss_fn: Callable[..., Any], params: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return loss_fn(params, *args, **kwargs)

    # ------------------------------------------------------------------ host: counting, numbers, checkpoints

    def initialize_count_status(self, init_counts: int, max_counts: int) -> None:
        """Set the position of training, so that the last window of accumulation is closed.

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
        """Return whether the iteration counted last updates the parameters."""
        return self._accumulation.is_update(self.inner_count)

    def should_sync(self) -> bool:
        """Return whether the next iteration to be counted updates, so that replicas must exchange gradients."""
        return self._accumulation.is_update(self.inner_count + 1)

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rates: `lr` of each group, preceded by `base_lr` when there is more than one group."""
        if self.defaults.get("lr") is None:  # an optax transformation without one, or that keeps it to itself
            return {}
        lr = [group["lr"] for group in self.param_groups]
        return (
            {"lr": lr} if self.base_param_settings is None else {"base_lr": [self.base_param_settings["lr"]], "lr": lr}
        )

    def get_momentum(self) -> dict[str, list[float]]:
        """Return the momentum of each group: `momentum`, else the first of `betas`, else `b1`, else 0."""
        if not self.defaults:  # an optax transformation that keeps its numbers to itself
            return {}
        return {"momentum": [_momentum(group) for group in self.param_groups]}

    def group_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the parameter groups as a table: column names, and rows of strings once parameters are known."""
        return self.grouped.table()

    def group_state_dict(self) -> dict[str, Any]:
        """Return the numbers of all groups, as JSON can hold them."""
        return self.grouped.state_dict()

    def load_group_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the numbers of a `group_state_dict`.

        Raises:
          ValueError: it has another number of groups.
        """
        self.grouped.load_state_dict(state_dict)

    def state_dict(self, opt_state: OptState) -> dict[str, Any]:
        """Return `state` (arrays), `param_groups` and, with more than one group, `base_param_settings`."""
        return {"state": opt_state, **self.group_state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any], opt_state: OptState) -> OptState:
        """Restore a `state_dict`.

        Args:
          state_dict: what `state_dict` returned, here or in a run with the same config.
          opt_state: the state of this run; gives the structure.

        Raises:
          ValueError: another structure or another number of groups.
        """
        saved = state_dict["state"]
        found, expected = str(jax.tree.structure(saved)), str(jax.tree.structure(opt_state))
        if found != expected:
            raise ValueError(f"the saved optimizer state is {found}, expected {expected}")
        self.load_group_state_dict(state_dict)
        return saved

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
        """Run one training iteration: gradients, then an update or, inside an accumulation window, their addition.

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
        """Add the gradients of `loss_fn(params, *args)` to those at hand, and count one iteration; never step.

        Returns:
          The new state and what `loss_fn` returned.
        """
        self.start_step()
        if not isinstance(opt_state.inner_state, AccumulateState):
            trainable = self.grouped.layout(params).trainable(params)
            opt_state = opt_state._replace(inner_state=init_accumulation(trainable, opt_state.inner_state))
        out, grads = self.value_and_grad(loss_fn, has_aux)(params, opt_state, *args)
        accumulating = self._transformation(every=2)  # any window: it never ends here
        return accumulating.update(grads, opt_state, None, is_last=False)[1], out

    def step(
        self, params: Tree, opt_state: OptState, hyperparams: Mapping[str, Any] | None = None
    ) -> tuple[Tree, OptState]:
        """Clip the gradients that `backward` summed and step on them, as they are: nothing is divided or cleared.

        Returns:
          The new parameters and state; without a `backward` before, the old ones.
        """
        window = opt_state.inner_state
        if not isinstance(window, AccumulateState):
            return params, opt_state
        numbers = self.hyperparams if hyperparams is None else hyperparams
        layout = self.grouped.layout(params)
        grads = layout.fill(sum_of_window(window), jax.tree.map(jnp.zeros_like, params))
        own = opt_state._replace(inner_state=window.inner_state)
        updates, own = self._tx_of_mean.update(grads, own, params, hyperparams=numbers)
        new_state = own._replace(inner_state=window._replace(inner_state=own.inner_state))
        return optax.apply_updates(params, updates), new_state

    def zero_grad(self, opt_state: OptState) -> OptState:
        """Clear the summed gradients."""
        window = opt_state.inner_state
        if not isinstance(window, AccumulateState):
            return opt_state
        return opt_state._replace(inner_state=window._replace(num_accumulated=jnp.zeros((), jnp.int32)))

    @contextlib.contextmanager
    def optim_context(self, model: Any = None) -> Iterator[bool]:
        """Surround the forward pass, as in MMEngine; yield whether this iteration's gradients will be used at once.

        Nothing needs switching here: what accumulates is a program without an exchange of gradients, and the compute
        dtype belongs to `autocast`.
        """
        yield self.should_sync()

    def autocast(self, apply_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `apply_fn` as it is; an `AmpOptimWrapper` wraps it to compute in its low precision."""
        return apply_fn

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles keep: not the chains, which belong to these groups."""
        return {name: value for name, value in self.__dict__.items() if name not in ("tx", "_tx_of_mean")}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.optimizer.name}, {len(self.param_groups)} groups, "
            f"accumulative_counts={self.accumulative_counts}, clip_grad={self.clip_grad})"
        )


def _clipping(clip_grad: ClipByNorm | ClipByValue | None) -> Parts:
    if clip_grad is None:
        return []
    if isinstance(clip_grad, ClipByNorm):
        return [("clip_by_norm", clip_by_norm(*clip_grad))]
    return [("clip", optax.clip(clip_grad.clip_value))]


def _momentum(group: Mapping[str, Any]) -> float:
    if "betas" in group:
        return group["betas"][0]
    return group.get("momentum", group.get("b1")) or 0.0


def _sum_of_losses(loss: Any) -> jax.Array:
    """Return the loss, or the sum of the losses in a dict."""
    if not isinstance(loss, Mapping):
        return loss
    losses = [jnp.mean(value) for name, value in loss.items() if "loss" in name]
    if not losses:
        raise ValueError(f"a dict of losses must have a name that contains 'loss', got {sorted(loss)}")
    return sum(losses[1:], start=losses[0])


def _all_or_none(decays: jax.Array) -> bool:
    found = np.unique(np.asarray(decays) != 0)
    if len(found) > 1:
        raise ValueError("the layers of a stacked parameter differ in weight decay, which a mask cannot say")
    return bool(found[0])
