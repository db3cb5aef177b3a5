"""Traced points: what hooks compute inside the step, each with a state and a random key."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import struct
from optax import OptState, Updates

from jengine.data.batch_check import Batch
from jengine.train.kept_types import keep_types

PyTree = Any


class StepContext(struct.PyTreeNode):
    """Values in the current step. A hook receives a context and returns `ctx.replace(...)`.

    Attributes:
      step: int32[], iterations done before this one.
      rng: key<fry>[], for this hook in this iteration, another one on each replica.
      batch: the batch.
      hyperparams: f32 arrays by name, passed by the host.
      params: parameters; before the update at `traced_batch` and `traced_grads`, after it at
        `traced_update`.
      model_state: model state; the new one once the loss is computed.
      opt_state: optimizer wrapper state; the new one at `traced_update`.
      grads: gradients of the total loss; None before they are computed, and at `traced_update` with
        several optimizers or a model's own `train_step`.
      loss_weight: f32[], weight of the gradients in a mean over iterations or replicas; None for
        equal weights.
      metrics: f32[] by name, returned by the step.
      hook_state: the current hook's state, see `Hook.init_traced_state`.
      apply_update: bool[], or None for True. A hook may set it at `traced_batch` or `traced_grads`.
        If it is False, the step changes only `step` and the states of hooks with
        `update_on_skipped_steps`.
      is_updated: bool[] at `traced_update`, or None for True: whether an optimizer has changed the
        parameters. False where all gradients overflowed under a loss scale.
      old_params: parameters before the iteration.
      axis_name: the replicas' mapped axis, None without one. Gradients belong to one replica: what
        a hook decides from them must be reduced over this axis, or the replicas will disagree.
    """

    step: jax.Array
    rng: jax.Array
    batch: Batch
    hyperparams: Mapping[str, Any]
    params: PyTree
    model_state: PyTree
    opt_state: OptState
    grads: Updates = None
    loss_weight: jax.Array | None = None
    metrics: dict[str, jax.Array] = struct.field(default_factory=dict)
    hook_state: PyTree = None
    apply_update: jax.Array | None = None
    is_updated: jax.Array | None = None
    old_params: PyTree = None
    axis_name: str | None = struct.field(pytree_node=False, default=None)


POINTS = ("traced_batch", "traced_grads", "traced_update", "traced_accumulate")


class TracedHooks:
    """Hooks with traced points or state, in the given order, under names that are stable across
    restarts.
    """

    def __init__(self, hooks: Sequence[Any]) -> None:
        self._hooks = hook_names(
            [hook for hook in hooks if hook.get_traced_points() or _has_state(hook)]
        )

    def init(self, params: PyTree, model_state: PyTree) -> dict[str, PyTree]:
        """Return the initial hook states by name, for hooks that have one."""
        states = {
            name: hook.init_traced_state(params, model_state) for name, hook in self._hooks.items()
        }
        return {name: state for name, state in states.items() if state is not None}

    def run(
        self, point: str, ctx: StepContext, states: Mapping[str, PyTree]
    ) -> tuple[StepContext, Mapping[str, PyTree]]:
        """Pass the context through one of the `POINTS` of each hook, in order.

        Return it with the new hook states.

        Raises:
          TypeError: a hook did not return a context. ValueError: its state has changed, see
            `keep_types`. Exception: a hook's error, with its name as a note.
        """
        rng = ctx.rng
        for name, hook in self._hooks.items():
            if point not in hook.get_traced_points():
                continue
            # a key from the name, not the position: another hook in the config must not change the
            # random numbers CRC32, because `hash` differs between processes
            key = jax.random.fold_in(rng, zlib.crc32(name.encode()))
            try:
                ctx = getattr(hook, point)(ctx.replace(hook_state=states.get(name), rng=key))
            except Exception as error:
                error.add_note(f"in {type(hook).__name__}.{point}, within the step")
                raise
            if not isinstance(ctx, StepContext):
                raise TypeError(
                    f"{type(hook).__name__}.{point} must return the context (`return "
                    f"ctx.replace(...)`), got {type(ctx).__name__}"
                )
            if name in states:  # a new dict: a branch may not change the old one
                states = {
                    **states,
                    name: keep_types(states[name], ctx.hook_state, f"hook_state.{name}."),
                }
        # these belonged to the last hook
        return ctx.replace(rng=rng, hook_state=None), states

    def have(self, point: str) -> bool:
        """Return whether a hook defines one of the `POINTS`."""
        return any(point in hook.get_traced_points() for hook in self._hooks.values())

    def states_after_skip(
        self, before: Mapping[str, PyTree], after: Mapping[str, PyTree]
    ) -> dict[str, PyTree]:
        """Return the states after a skipped step: `after` for hooks with
        `update_on_skipped_steps`, else `before`.
        """
        updated = {name for name, hook in self._hooks.items() if hook.update_on_skipped_steps}
        return {name: after[name] if name in updated else state for name, state in before.items()}


def hook_names(hooks: Sequence[Any]) -> dict[str, Any]:
    """Return the hooks by class name; from the second hook of a class on, a number is appended.

    >>> list(hook_names([1, "a", 2]))
    ['int', 'str', 'int_1']
    """
    named: dict[str, Any] = {}
    for hook in hooks:
        base = type(hook).__name__
        count = sum(type(other).__name__ == base for other in named.values())
        named[f"{base}_{count}" if count else base] = hook
    return named


def _has_state(hook: Any) -> bool:
    # By name, because jengine.hooks imports this module
    return any(
        "init_traced_state" in vars(cls)
        for cls in type(hook).__mro__[:-1]
        if cls.__name__ != "Hook"
    )
