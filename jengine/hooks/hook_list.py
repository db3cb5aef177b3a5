"""The hooks of a run in their order, and the calls to them."""

from collections.abc import Callable, Iterator
from typing import Any

from jengine.errors import ConfigError
from jengine.hooks.calendar import Calendar
from jengine.hooks.hook import Hook
from jengine.hooks.level import get_level, to_priority
from jengine.hooks.priority import Priority, get_priority, priority_name
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS

ITERATION_STAGES = ("before_train_iter", "after_train_iter")


class HookList:
    """Hooks sorted by priority; among equals the one registered first runs first.

    Who acts at a stage is looked up once and kept: a stage at which no hook acts costs a dictionary access. At the two
    stages of a training iteration, which come most often, it is also known when (see `Hook.next_due`).
    """

    def __init__(self) -> None:
        self._hooks: list[tuple[int, Hook]] = []
        self._methods: dict[str, list[tuple[Hook, Callable[..., Any]]]] = {}
        self._calendars: dict[str, Calendar] = {}

    def register(self, hook: Hook | dict[str, Any], priority: int | str | Priority | None = None) -> Hook:
        """Adds a hook, given as it is or as a config.

        Args:
          hook: an instance, or `dict(type=..., priority=..., **arguments)`, which is left as it was. A `level` on
            iMIX's scale may take the place of the priority.
          priority: goes before the config's `priority`, which goes before that of the class.

        Raises:
          TypeError: neither a hook nor a config of one. ConfigError: both a priority and a level.
        """
        if not isinstance(hook, Hook) and hasattr(hook, "items"):
            cfg = dict(hook)
            configured = _pop_priority(cfg)
            priority = configured if priority is None else priority
            hook = HOOKS.build(cfg)
        if not isinstance(hook, Hook):
            raise TypeError(f"a hook is an instance of Hook or a config dict, found {hook!r}")
        value = get_priority(hook.priority if priority is None else priority)
        index = sum(other <= value for other, _ in self._hooks)
        self._hooks.insert(index, (value, hook))
        self._methods.clear()
        self._calendars.clear()
        return hook

    def call(self, runner: "Runner", stage: str, **arguments: Any) -> None:
        """Calls the method `stage` of every hook that defines it, in order.

        An exception keeps its type and traceback; a note says which hook, stage and iteration it came from.
        """
        if stage in ITERATION_STAGES:
            self.calendar(runner, stage).call(runner.iter, **arguments)
            return
        self._calendars.clear()  # an epoch or a validation may move what is due
        for hook, method in self._acting(stage):
            try:
                method(runner, **arguments)
            except Exception as error:
                error.add_note(f"in {type(hook).__name__}.{stage} at iteration {runner.iter} (epoch {runner.epoch})")
                raise

    def window_end(self, runner: "Runner", start: int, end: int) -> int:
        """Where a call of the step that begins with the iteration `start`, and would end before `end`, must end.

        No hook is due before a later iteration of it, nor after an earlier one than its last.
        """
        before, after = (self.calendar(runner, stage) for stage in ITERATION_STAGES)
        return int(min(end, before.next_due(start + 1), after.next_due(start) + 1))

    def cutting_each(self, runner: "Runner") -> list[Hook]:
        """The hooks that leave every iteration a call of its own."""
        found = [hook for stage in ITERATION_STAGES for hook in self.calendar(runner, stage).cutting_each(runner.iter)]
        return list(dict.fromkeys(found))

    def calendar(self, runner: "Runner", stage: str) -> Calendar:
        """When the hooks act at one of the `ITERATION_STAGES`; up to the next call of any other stage."""
        calendar = self._calendars.get(stage)
        if calendar is None:
            calendar = self._calendars[stage] = Calendar(runner, stage, self._acting(stage))
        return calendar

    def describe(self) -> str:
        """The order of calls, stage by stage, as a run prints it."""
        text = []
        hooks = [(value, type(hook).__name__, hook.get_triggered_stages()) for value, hook in self._hooks]
        for stage in Hook.stages:
            rows = [f"({priority_name(value):<12}) {name:<35}" for value, name, stages in hooks if stage in stages]
            if rows:
                text.append("\n".join([f"{stage}:", *rows, " -------------------- "]))
        return "\n".join(text)

    def priority_of(self, hook: Hook) -> int:
        """The priority with which `hook` was registered."""
        return next(value for value, other in self._hooks if other is hook)

    def __iter__(self) -> Iterator[Hook]:
        return iter([hook for _, hook in self._hooks])

    def __len__(self) -> int:
        return len(self._hooks)

    def _acting(self, stage: str) -> list[tuple[Hook, Callable[..., Any]]]:
        """The hooks that act at a stage and their methods, in order; looked up once."""
        methods = self._methods.get(stage)
        if methods is None:
            methods = self._methods[stage] = self._find(stage)
        return methods

    def _find(self, stage: str) -> list[tuple[Hook, Callable[..., Any]]]:
        if stage in Hook.stages:
            acting = [hook for hook in self if stage in hook.get_triggered_stages()]
        else:  # a stage of a user's own loop
            acting = [hook for hook in self if callable(getattr(hook, stage, None))]
        return [(hook, getattr(hook, stage)) for hook in acting]


def _pop_priority(cfg: dict[str, Any]) -> int | str | Priority | None:
    """Takes what says when the hook runs out of its config: `priority`, or `level` on iMIX's scale."""
    priority, level = cfg.pop("priority", None), cfg.pop("level", None)
    if level is None:
        return priority
    if priority is not None:
        raise ConfigError(
            "a hook has a priority (0 to 100, as in MMEngine) or a level (0 to 60, as in iMIX), found both: "
            f"{priority!r} and {level!r}"
        )
    return to_priority(get_level(level))
