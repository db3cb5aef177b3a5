"""When hooks act: at a stage of the training iteration those that are due are called, the others are not asked."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner


class _Entry:
    """A hook at the stage, and the next iteration at which it acts there."""

    __slots__ = ("ahead", "always", "due", "hook", "method")

    def __init__(self, hook: Hook, method: Callable[..., Any]) -> None:
        self.hook = hook
        self.method = method
        self.ahead = hook.in_windows == "ahead"
        self.always = hook.in_windows != "cut" or type(hook).next_due is Hook.next_due
        self.due: float = -1


class Calendar:
    """One stage of the training iteration, with its hooks in their order.

    Args:
      runner: handed to the hooks.
      stage: 'before_train_iter' or 'after_train_iter'.
      acting: `(hook, method)` pairs.

    Attributes:
      acts_ahead: whether any of them acts ahead of the step (`Hook.in_windows`).
    """

    def __init__(self, runner: "Runner", stage: str, acting: Sequence[tuple[Hook, Callable[..., Any]]]) -> None:
        self._runner = runner
        self._stage = stage
        self._entries = [_Entry(hook, method) for hook, method in acting]
        self._ahead = [entry for entry in self._entries if entry.ahead]
        self.acts_ahead = bool(self._ahead)
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
            try:
                entry.method(self._runner, **arguments)
            except Exception as error:
                self._note(error, entry.hook)
                raise
            if not entry.always:
                entry.due = entry.hook.next_due(self._runner, self._stage, iteration + 1)

    def call_ahead(self, **arguments: Any) -> None:
        """Calls the hooks that act ahead of the step (`Hook.in_windows`)."""
        self._call(self._ahead, arguments)

    def call_last(self, **arguments: Any) -> None:
        """Calls the hooks that take all iterations of a call at once (`Hook.in_windows`)."""
        self._call([entry for entry in self._entries if entry.hook.in_windows == "last"], arguments)

    def _call(self, entries: Sequence[_Entry], arguments: dict[str, Any]) -> None:
        for entry in entries:
            try:
                entry.method(self._runner, **arguments)
            except Exception as error:
                self._note(error, entry.hook)
                raise

    def next_due(self, start: int) -> float:
        """The first iteration from `start` on that cuts a window for a hook; infinite for never."""
        ask = (entry.hook.next_due(self._runner, self._stage, start) for entry in self._entries)
        return min(ask, default=math.inf)

    def cutting_each(self, start: int) -> list[Hook]:
        """The hooks that cut at `start` and at the iteration after it, so that no window is longer than one."""
        ask = [entry.hook for entry in self._entries]
        return [h for h in ask if all(h.next_due(self._runner, self._stage, i) == i for i in (start, start + 1))]

    def _note(self, error: Exception, hook: Hook) -> None:
        where = f"{type(hook).__name__}.{self._stage}"
        error.add_note(f"in {where} at iteration {self._runner.iter} (epoch {self._runner.epoch})")
