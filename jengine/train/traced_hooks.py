"""Run the traced points of hooks inside the step, each hook with its own state and key."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jengine.train.context import StepContext

PyTree = Any
POINTS = ("traced_batch", "traced_grads", "traced_update", "traced_accumulate")


class TracedHooks:
    """Hold hooks with traced points or state, in the order given, under names that survive a restart.

    The name of a hook is its class name; the second of a class is called `Name_1`, and so on.
    """

    def __init__(self, hooks: Sequence[Any]) -> None:
        self._hooks = hook_names([hook for hook in hooks if hook.get_traced_points() or _has_state(hook)])

    def init(self, params: PyTree, model_state: PyTree) -> dict[str, PyTree]:
        """Return the state of each hook that has one, by name."""
        states = {name: hook.init_traced_state(params, model_state) for name, hook in self._hooks.items()}
        return {name: state for name, state in states.items() if state is not None}

    def run(
        self, point: str, ctx: StepContext, states: Mapping[str, PyTree]
    ) -> tuple[StepContext, Mapping[str, PyTree]]:
        """Pass the context through `point` of each hook, in order.

        Args:
          point: one of `POINTS`.
          ctx: context of the step.
          states: state of each hook, by name.

        Returns:
          The context and the states that the hooks returned.

        Raises:
          TypeError: a hook did not return a context.
        """
        rng = ctx.rng
        for name, hook in self._hooks.items():
            if point not in hook.get_traced_points():
                continue
            own = ctx.replace(hook_state=states.get(name), rng=jax.random.fold_in(rng, zlib.crc32(name.encode())))
            ctx = getattr(hook, point)(own)
            if not isinstance(ctx, StepContext):
                raise TypeError(
                    f"{type(hook).__name__}.{point} must return the context (`return ctx.replace(...)`), "
                    f"got {type(ctx).__name__}"
                )
            if name in states:
                states = {**states, name: ctx.hook_state}
        return ctx.replace(rng=rng, hook_state=None), states

    def after_skip(self, before: Mapping[str, PyTree], now: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Return the states after a skipped step: `before`, but `now` for hooks with `update_on_skipped_steps`."""
        counting = {name for name, hook in self._hooks.items() if getattr(hook, "update_on_skipped_steps", False)}
        return {name: now[name] if name in counting else state for name, state in before.items()}


def hook_names(hooks: Sequence[Any]) -> dict[str, Any]:
    """Return the hooks by class name, numbered from the second of a class on."""
    named: dict[str, Any] = {}
    for hook in hooks:
        base = type(hook).__name__
        count = sum(type(other).__name__ == base for other in named.values())
        named[f"{base}_{count}" if count else base] = hook
    return named


def _has_state(hook: Any) -> bool:
    return any("init_traced_state" in vars(cls) for cls in type(hook).__mro__[:-1] if cls.__name__ != "Hook")
