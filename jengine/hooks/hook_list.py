"""Sort the hooks of a run and call them."""

import bisect
import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jengine.config.errors import ConfigError, config_path, did_you_mean
from jengine.config.plugins import load_provided, provided
from jengine.config.registry import HOOKS
from jengine.hooks.hook import Hook
from jengine.hooks.priority import Priority, get_priority, get_priority_name
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging import tables
from jengine.logging.console import in_notebook
from jengine.logging.loss_watch import NonFiniteLossError
from jengine.logging.tables import shorten_rows

_ITERATION_STAGES = ("before_train_iter", "after_train_iter")
KINDS = ("state", "metrics", "hyperparams")  # of `Hook.acts_on`
_LIMITING = ("state",)  # those that a chunk does not cross
# A hook that defines a stage, its method, and whether the hook overrides `next_step`
_Listener = tuple[Hook, Callable[..., Any], bool]

DEFAULT_HOOKS: dict[str, dict[str, Any]] = dict(
    runtime_info=dict(type="RuntimeInfoHook"),
    timer=dict(type="IterTimerHook"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    logger=dict(type="LoggerHook"),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", interval=1),
)
# further default hooks in a notebook, if an extra has them
_NOTEBOOK_HOOKS = dict(progress=dict(type="ProgressHook"))
_MODES = ("train", "val", "test")
_MAX_ROWS = 10  # of the table
# similarity at which a method is a misspelled stage; hooks may define their own stages
_ALMOST = 0.9


class HookList:
    """Sort hooks by priority; hooks with equal priority run in registration order.

    Args:
      hooks: as `register_all` takes them.
    """

    def __init__(self, hooks: Any = None) -> None:
        # changes the methods of hooks, in a run that checks what they do
        self.wrap_stage: Callable[[Hook, str, Any], Any] = lambda hook, stage, method: method
        self._named: dict[str, Hook | None] = {}  # None for a hook that was removed
        self._hooks: list[tuple[int, Hook]] = []
        # by stage and the kinds of `Hook.acts_on`, in order
        self._listeners: dict[tuple[str, Sequence[str]], list[_Listener]] = {}
        self.register_all(hooks)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which hooks were registered, or removed."""
        return tuple(self._named)

    def register(
        self,
        hook: Hook | dict[str, Any],
        priority: int | str | Priority | None = None,
        name: str | None = None,
    ) -> Hook:
        """Add a hook.

        Args:
          hook: an instance, or `dict(type=..., priority=..., **arguments)`, which is not modified.
            `level`, on the scale of iMIX, may replace `priority`.
          priority: overrides the config's `priority`, which overrides that of the class.
          name: the hook replaces the one that was registered under this name.

        Raises:
          TypeError: not a hook or its config. ConfigError: both a priority and a level, or a second
            hook of a class with `is_single`.
        """
        if isinstance(hook, str):
            hook = {"type": hook}
        if not isinstance(hook, Hook) and hasattr(hook, "items"):
            cfg = dict(hook)
            configured = cfg.pop("priority", None)
            if "level" in cfg:
                configured = _read_level(cfg.pop("level"), configured)
            priority = configured if priority is None else priority
            hook = HOOKS.build(cfg)
        if not isinstance(hook, Hook):
            raise TypeError(f"a hook must be an instance of Hook or a config dict, got {hook!r}")
        value = get_priority(hook.priority if priority is None else priority)
        _check_stages(hook)  # before it replaces another
        if name is not None and name in self._named:
            self.remove(name)  # first, or a hook with `is_single` could not replace another
        if hook.is_single:
            self._check_single(hook)
        if name is not None:
            self._named[name] = hook
        # after those of equal priority
        bisect.insort(self._hooks, (value, hook), key=operator.itemgetter(0))
        self._listeners.clear()  # found again at the next call
        return hook

    def register_defaults(self, hooks: Mapping[str, Any] | None = None) -> None:
        """Register the default hooks.

        `hooks` replaces them by name, removes them with None, or adds others.
        """
        if hooks is not None and not hasattr(hooks, "items"):
            raise TypeError(
                f"default_hooks must be a dict of hooks by name, got {type(hooks).__name__}"
            )
        # A dict of some hooks changes these only; the others stay, as in MMEngine.
        has_progress = in_notebook() and "ProgressHook" in provided("HOOKS")
        defaults = {**DEFAULT_HOOKS, **(_NOTEBOOK_HOOKS if has_progress else {})}
        missing = {name: hook for name, hook in defaults.items() if name not in self._named}
        known = list(dict.fromkeys((*DEFAULT_HOOKS, *_NOTEBOOK_HOOKS, *self._named)))
        for name, hook in {**missing, **dict((hooks or {}).items())}.items():
            with config_path("default_hooks", name):
                if hook is not None:
                    # `logger_of_mine` is another name, `loger` is a misspelled one
                    is_new = name not in known and not str(name).startswith(tuple(known))
                    if is_new and (hint := did_you_mean(str(name), known, cutoff=0.8)):
                        raise ConfigError(
                            "`default_hooks` must have other names for further hooks, got "
                            f"{name!r}{hint}"
                        )
                    if hasattr(hook, "items") and "type" not in hook and name in defaults:
                        hook = {**defaults[name], **hook}
                    self.register(hook, name=name)
                elif name not in known:
                    raise ValueError(
                        f"a default hook to remove must be one of {', '.join(known)}, got {name!r}"
                    )
                else:
                    self.remove(name)

    def register_all(self, hooks: Any = None) -> None:
        """Register further hooks: a list with hooks or configs, or a single one."""
        if isinstance(hooks, str | Hook) or hasattr(hooks, "items"):
            hooks = [hooks]
        if hooks is not None and not isinstance(hooks, list | tuple):
            raise TypeError(
                f"custom_hooks must be a list of hooks, or one, got {type(hooks).__name__}"
            )
        for i, hook in enumerate(hooks or []):
            with config_path("custom_hooks", i):
                self.register(hook)

    def _check_single(self, hook: Hook) -> None:
        # The base that sets it, so that subclasses count as the same kind
        kind: type = type(hook)
        for base in type(hook).__mro__:
            kind = base if getattr(base, "is_single", False) else kind
        if not [other for _, other in self._hooks if isinstance(other, kind)]:
            return
        default = next(
            (name for name, other in self._named.items() if isinstance(other, kind)), None
        )
        hint = f"; change the default one with default_hooks=dict({default}=...)" if default else ""
        raise ConfigError(f"a run must have at most one {kind.__name__}, got a second{hint}")

    def remove(self, name: str) -> None:
        """Remove the hook that was registered under `name`, if there is one."""
        removed = self._named.get(name)
        self._named[name] = None  # remembered, so that no default takes its place
        self._hooks = [(value, hook) for value, hook in self._hooks if hook is not removed]
        self._listeners.clear()

    def call(self, stage: str, run: Any, kinds: Sequence[str] = KINDS, /, **arguments: Any) -> None:
        """Call the method `stage` of the hooks that define it, in order. Stages of a training
        iteration are called at the steps of a hook.

        An exception keeps its type and traceback; a note names the hook, the stage and the
        iteration.

        >>> import types
        >>> class Show(Hook):
        ...     def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        ...         print(runner.iter, outputs)
        >>> hooks = HookList([Show()])
        >>> run = types.SimpleNamespace(iter=7, epoch=0)
        >>> hooks.call("after_train_iter", run, batch_idx=7, outputs={"loss": 0.5})
        7 {'loss': 0.5}

        Args:
          stage: the name of the method, also for a stage of your own.
          run: what the hooks get as `runner`: the Runner, or, in a loop of your own, a value with
            `iter`, `epoch` and what your hooks read.
          kinds: only the hooks with one of these for `acts_on`.
          **arguments: those of the stage.
        """
        is_iteration = stage in _ITERATION_STAGES
        for hook, method, is_irregular in self._get_listeners(stage, kinds):
            try:
                if is_iteration:  # as `Hook.next_step` says, without a call of the default
                    every = hook.every
                    if is_irregular and every != -1:
                        step = run.iter
                        if hook.next_step(run, step) > step:
                            continue
                    elif every is not None and (every < 1 or (run.iter + 1) % every):
                        continue
                method(run, **arguments)
            except Exception as error:
                _add_note(error, hook, stage, run)
                raise

    def allows_chunk(self, runner: RunnerProtocol, size: int) -> bool:
        """Return whether no hook acts on the state within a chunk of `size` steps that starts at
        `runner.iter`.
        """
        first = runner.iter
        last = first + size - 1
        # At the ends of a chunk hooks are called as usual: before the first step, after the last
        return all(
            hook.next_step(runner, start) >= end
            for stage, start, end in (
                ("before_train_iter", first + 1, last + 1),
                ("after_train_iter", first, last),
            )
            for hook in self._list_limiting(stage)
        )

    def list_chunk_blockers(self, runner: RunnerProtocol) -> list[Hook]:
        """Return the hooks that act at this step and at the next, which limits chunks to one
        step.
        """
        hooks = dict.fromkeys(h for stage in _ITERATION_STAGES for h in self._list_limiting(stage))
        steps = (runner.iter, runner.iter + 1)
        return [h for h in hooks if all(h.next_step(runner, step) == step for step in steps)]

    def describe(self) -> str:
        """Return the order of calls, stage by stage, with the traced points between the stages
        of an iteration.
        """
        sections = []
        hooks = [
            (value, type(hook).__name__, [*hook.get_triggered_stages(), *hook.get_traced_points()])
            for value, hook in self._hooks
        ]
        # Traced points stand where they act: between the stages before and after an iteration.
        step = Hook.stages.index("after_train_iter")
        for stage in (*Hook.stages[:step], *Hook.traced_points, *Hook.stages[step:]):
            lines = [
                f"({get_priority_name(value):<12}) {name:<35}"
                for value, name, stages in hooks
                if stage in stages
            ]
            if lines:
                sections.append("\n".join([f"{stage}:", *lines, " -------------------- "]))
        return "\n".join(sections)

    def format_table(self) -> str:
        """Return a table with the hooks in order: priority, the loops in which they act, and the
        traced points.
        """
        rows = []
        for value, hook in self._hooks:
            stages = hook.get_triggered_stages()
            loops = [mode for mode in _MODES if any(f"_{mode}" in stage for stage in stages)]
            others = [stage for stage in stages if not any(f"_{mode}" in stage for mode in _MODES)]
            traced = [point.removeprefix("traced_") for point in hook.get_traced_points()]
            rows.append(
                [
                    type(hook).__name__,
                    get_priority_name(value),
                    ", ".join(loops or others),
                    ", ".join(traced),
                ]
            )
        return tables.format_table(
            ["hooks, in order", "priority", "acts in", "in the step"], shorten_rows(rows, _MAX_ROWS)
        )

    def priority_of(self, hook: Hook) -> int:
        """Return the priority with which `hook` was registered."""
        return next(value for value, other in self._hooks if other is hook)

    def __iter__(self) -> Iterator[Hook]:
        return iter(list(map(operator.itemgetter(1), self._hooks)))

    def __len__(self) -> int:
        return len(self._hooks)

    def _get_listeners(self, stage: str, kinds: Sequence[str]) -> list[_Listener]:
        """Return the hooks of these kinds that define a stage, in order, and keep them for the next
        call.
        """
        found = self._listeners.get((stage, kinds))
        if found is not None:
            return found
        is_known = stage in Hook.stages  # a custom loop may call others
        found = self._listeners[stage, kinds] = [
            (
                hook,
                self.wrap_stage(hook, stage, getattr(hook, stage)),
                type(hook).next_step is not Hook.next_step,
            )
            for hook in self
            if hook.acts_on in kinds
            and (stage in hook.get_triggered_stages() if is_known else hasattr(hook, stage))
        ]
        if not (is_known or found) and (hint := did_you_mean(stage, Hook.stages, cutoff=_ALMOST)):
            raise ConfigError(f"a stage must be one of `Hook.stages`, got {stage!r}{hint}")
        return found

    def _list_limiting(self, stage: str) -> Iterator[Hook]:
        """Yield the hooks with a stage of an iteration that a chunk does not cross."""
        for hook, _, _ in self._get_listeners(stage, _LIMITING):
            if hook.every != -1:
                yield hook


def _check_stages(hook: Hook) -> None:
    owner = type(hook).__name__
    if hook.acts_on not in KINDS:
        raise ConfigError(f"`{owner}.acts_on` must be one of {KINDS}, got {hook.acts_on!r}")
    if hook.every is not None and (isinstance(hook.every, bool) or not isinstance(hook.every, int)):
        raise ConfigError(
            f"`{owner}.every` must be a number of training iterations, or None, got {hook.every!r}"
        )
    # Nothing would call a method that is a misspelled stage or traced point
    known = (*Hook.stages, *Hook.traced_points)
    for method in dir(type(hook)):
        if method.startswith("_") or hasattr(Hook, method):
            continue
        match = difflib.get_close_matches(method, known, n=1, cutoff=_ALMOST)
        if match and callable(getattr(type(hook), method)):
            raise ConfigError(
                f"`{owner}.{method}` must be the name of a stage; did you mean {match[0]!r}?"
            )


def _add_note(error: Exception, hook: Hook, stage: str, runner: RunnerProtocol) -> None:
    if not isinstance(error, NonFiniteLossError):  # found where a hook waits for the losses
        error.add_note(
            f"in {type(hook).__name__}.{stage} at iteration {runner.iter} (epoch {runner.epoch})"
        )


def _read_level(level: Any, priority: Any) -> Any:
    """Return the priority for a `level` on iMIX's scale; without one, `priority`."""
    if level is None or priority is None:
        return priority if level is None else load_provided("hook_levels", "read_level")(level)
    raise ConfigError(
        "a hook must have a priority (0 to 100, as in MMEngine) or a level (0 to 60, as in "
        f"iMIX), got both: {priority!r} and {level!r}"
    )
