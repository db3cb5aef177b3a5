"""iMIX's hook: six methods without arguments that access the run as `self.trainer`."""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jax.typing import ArrayLike

from jengine.config.errors import ArgumentError
from jengine.extras.imix.levels import PriorityStatus, get_level, to_priority
from jengine.extras.imix.log_buffer import LogBuffer
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol

if TYPE_CHECKING:
    # subclasses define the six methods without arguments, which the signatures of Hook do not allow
    _Base = Any
else:
    _Base = Hook

STAGES = tuple(
    f"{when}_train{what}" for when in ("before", "after") for what in ("", "_epoch", "_iter")
)


class Trainer:
    """Weak proxy for a Runner, with its attributes also under iMIX's names: a hook does not keep
    the run alive.

    Setting an attribute sets that of the Runner. After the end of the Runner each access raises
    ReferenceError.
    """

    __slots__ = ("_runner",)
    _names: ClassVar[Mapping[str, str]] = {
        "_hooks": "hooks",
        "max_iter": "max_iters",
        "max_epoch": "max_epochs",
    }

    def __init__(self, runner: RunnerProtocol) -> None:
        # as `__setattr__` sets on the Runner
        object.__setattr__(self, "_runner", weakref.proxy(runner))

    def __getattr__(self, name: str) -> Any:
        return getattr(
            self._runner.train_loop if name == "by_epoch" else self._runner,
            self._names.get(name, name),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._runner, name, value)


class HookBase(_Base):
    """Base class for hooks with iMIX's six stages: `before_` and `after_` of `train`, `train_epoch`
    and `train_iter`.

    The methods take no arguments. `self.trainer` is a `Trainer`; other hooks are in
    `self.trainer.hooks`. In the two iteration methods `self.inner_iter` is the iteration index in
    the epoch, and in the second `self.outputs` are the step outputs, device arrays by name.
    Training by iterations has no epochs, so the epoch methods are not called. `after_train` is also
    called if training has failed.

    All other stages and the traced methods are those of `Hook`.

    >>> class PrintHook(HookBase):
    ...     def after_train(self):
    ...         print("trained for", self.trainer.max_iter, "iterations")

    Attributes:
      level: position among other hooks, see `PriorityStatus`; `level` in a config overrides it.
      log_buffer: validation results, images and histograms to write; None unless the hook has
        writers.
    """

    default_level: ClassVar[PriorityStatus] = PriorityStatus.NORMAL

    trainer: Any = None
    inner_iter: int = 0
    outputs: Mapping[str, Any] | None = None
    log_buffer: LogBuffer | None = None
    _level: PriorityStatus | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.priority = to_priority(cls.default_level)
        for stage in STAGES:
            if stage in vars(cls):
                setattr(cls, stage, _add_runner_arguments(cls, stage, vars(cls)[stage]))

    @property
    def level(self) -> PriorityStatus:
        """The position among other hooks."""
        return self.default_level if self._level is None else self._level

    @level.setter
    def level(self, level: PriorityStatus | str | int) -> None:
        """Set the level from a member, a name or a number; see `get_level`."""
        self._level = get_level(level)
        self.priority = to_priority(self._level)

    def bind(self, runner: RunnerProtocol) -> None:
        """Set `self.trainer` to a weak proxy for the run."""
        self.trainer = Trainer(runner)

    def put_image(self, name: str, data: ArrayLike) -> None:
        """Write an image in this iteration; ignored if no writer in the run accepts images.

        Args:
          name: image tag.
          data: uint8[H, W, C], or floats from 0 to 1; C is 1, 3 or 4. The host does not wait for a
            device array.
        """
        for buffer in self.log_buffers():
            buffer.put_image(name, data, self.trainer.iter)

    def put_histogram(self, name: str, data: ArrayLike) -> None:
        """Write a histogram of an array of real numbers; see `put_image`."""
        for buffer in self.log_buffers():
            buffer.put_histogram(name, data, self.trainer.iter)

    def log_buffers(self) -> list[LogBuffer]:
        """Return the log buffer of each PeriodicLogger in the run."""
        hooks = [hook for hook in self.trainer.hooks if isinstance(hook, HookBase)]
        return [hook.log_buffer for hook in hooks if hook.log_buffer is not None]

    def on_failure(self, runner: RunnerProtocol) -> None:
        """Call `after_train` when training has ended with an error; the error propagates."""
        if "after_train" in self.get_triggered_stages():
            try:
                self.after_train(runner)
            except Exception as error:  # must not hide the error that ended training
                runner.logger.error(
                    f"{type(self).__name__}.after_train failed: {type(error).__name__}: {error}"
                )


def _add_runner_arguments(
    cls: type, stage: str, method: Callable[[Any], None]
) -> Callable[..., None]:
    """Return the method with the arguments that the Runner passes.

    All are optional for `super().before_train()`.
    """
    parameters = list(inspect.signature(method).parameters)
    if len(parameters) != 1:
        raise TypeError(
            f"{cls.__name__}.{stage} must have no arguments except self, because {cls.__name__} "
            f"is a HookBase, got {parameters}; use self.trainer for the run, or derive from "
            "jengine.hooks.Hook for methods with a runner"
        )

    @functools.wraps(method)
    def call(
        self: HookBase,
        runner: RunnerProtocol | None = None,
        batch_idx: int | None = None,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        if runner is None:  # called by a subclass, as `super().before_train()`
            return method(self)
        if stage.endswith("_epoch") and not runner.train_loop.by_epoch:
            return None  # training by iterations has no epochs, as in iMIX
        self.bind(runner)
        if batch_idx is not None:
            self.inner_iter = batch_idx
            self.outputs = outputs
        return method(self)

    return call


def register_hooks(runner: RunnerProtocol, hooks: Iterable[HookBase | None]) -> None:
    """Add built hooks to a run and set `trainer` of each; None is skipped."""
    for hook in hooks:
        if hook is None:
            continue
        if not isinstance(hook, HookBase):
            raise ArgumentError(
                f"a hook of iMIX must be a HookBase, got {type(hook).__name__}: {hook!r}"
            )
        # First: from its registration on the hook may be called, and reads the trainer.
        hook.bind(runner)
        runner.register_hook(hook)
