"""When hooks act: at a stage of the training iteration those that are due are called, the others are not asked."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jengine.hooks.hook import Hook

if TYPE_CHECKING:
    from jengine.runner import Runner


class _Entry:
    """A hook at the stage, and the next iteration at which it acts there."""

    __slots__ = ("ahead", "always", "due", "hook", "method", "says")

    def __init__(self, hook: Hook, method: Callable[..., Any]) -> None:
        self.hook = hook
        self.method = method
        self.ahead = getattr(hook, "acts_ahead", False)
        self.says = getattr(type(hook), "next_due", Hook.next_due) is not Hook.next_due
        self.always = self.ahead or not self.says
        self.due: float = -1


class Calendar:
    """One stage of the training iteration, with its hooks in their order.

    Args:
      runner: handed to the hooks.
      stage: 'before_train_iter' or 'after_train_iter'.
      acting: `(hook, method)` pairs.
    """

    def __init__(self, runner: "Runner", stage: str, acting: Sequence[tuple[Hook, Callable[..., Any]]]) -> None:
        self._runner = runner
        self._stage = stage
        self._entries = [_Entry(hook, method) for hook, method in acting]
        for entry in self._entries:
            if not entry.always:
                entry.due = entry.hook.next_due(runner, stage, runner.iter)

    def call(self, iteration: int, **arguments: Any) -> None:
        """Calls the hooks that are due at `iteration`.

        An exception keeps its type and traceback; a note says which hook, stage and iteration it came from.
        """
        for entry in self._entries:
            if entry.due > iteration:
                continue
            self._call(entry, arguments)
            if not entry.always:
                entry.due = entry.hook.next_due(self._runner, self._stage, iteration + 1)

    def call_ahead(self, **arguments: Any) -> None:
        """Calls the hooks that may act before the step of the iteration has run (`Hook.acts_ahead`)."""
        for entry in self._entries:
            if entry.ahead:
                self._call(entry, arguments)

    def next_due(self, start: int) -> float:
        """The first iteration from `start` on at which a hook acts that does not act ahead; infinite for never."""
        return min((self._next_of(entry, start) for entry in self._entries), default=math.inf)

    def busiest(self, start: int) -> Hook | None:
        """The first hook that acts at `start` and at the iteration after it, None if no hook does."""
        for entry in self._entries:
            if self._next_of(entry, start) == start and self._next_of(entry, start + 1) == start + 1:
                return entry.hook
        return None

    def _next_of(self, entry: _Entry, start: int) -> float:
        if entry.says:
            return entry.hook.next_due(self._runner, self._stage, start)
        return math.inf if entry.ahead else start

    def _call(self, entry: _Entry, arguments: dict[str, Any]) -> None:
        runner = self._runner
        try:
            entry.method(runner, **arguments)
        except Exception as error:
            error.add_note(
                f"in {type(entry.hook).__name__}.{self._stage} at iteration {runner.iter} (epoch {runner.epoch})"
            )
            raise
