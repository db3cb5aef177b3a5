"""The hook of iMIX: six methods without arguments, and the trainer within reach."""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jengine.contrib.imix.log_buffer import LogBuffer
from jengine.hooks.hook import Hook
from jengine.hooks.priority import PriorityStatus, get_level, to_priority
from jengine.hooks.runner_protocol import Runner

if TYPE_CHECKING:
    _Base = Any  # subclasses define the six methods without arguments, which the signatures of Hook do not allow
else:
    _Base = Hook

STAGES = (
    "before_train",
    "before_train_epoch",
    "before_train_iter",
    "after_train_iter",
    "after_train_epoch",
    "after_train",
)


class HookBase(_Base):
    """A hook as iMIX has it: six methods, `before_` and `after_` of `train`, `train_epoch` and `train_iter`.

    The methods take no arguments. The run is at `self.trainer`, a weak proxy of the Runner, which a hook may therefore
    keep without keeping the run alive; other hooks are at `self.trainer.hooks`. In the two iteration methods
    `self.inner_iter` is the number of the iteration in its epoch, from 0, and in the second `self.outputs` are what the
    step returned, device arrays by name. A training that counts iterations has no epochs: their methods are not
    called. `after_train` is called when training has failed, too.

    All other stages and the traced points are those of `Hook`.

    Attributes:
      level: when the hook runs among others, see `PriorityStatus`; a config's `level` goes before it.
    """

    default_level: ClassVar[PriorityStatus] = PriorityStatus.NORMAL

    trainer: Any = None
    inner_iter: int = 0
    outputs: Mapping[str, Any] | None = None
    _level: PriorityStatus | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.priority = to_priority(cls.default_level)
        for stage in STAGES:
            if stage in vars(cls):
                setattr(cls, stage, _with_arguments(cls, stage, vars(cls)[stage]))

    @property
    def level(self) -> PriorityStatus:
        """When the hook runs among others."""
        return self.default_level if self._level is None else self._level

    @level.setter
    def level(self, level: Any) -> None:
        """Sets it, from anything that `get_level` takes."""
        self._level = get_level(level)
        self.priority = to_priority(self._level)

    def bind(self, runner: Runner) -> None:
        """Puts the run within reach, without keeping it alive."""
        self.trainer = weakref.proxy(runner)

    def put_image(self, name: str, data: Any) -> None:
        """Has the writers write an image of this iteration; a run without a writer that takes images ignores it.

        Args:
          name: what it is called.
          data: uint8[H, W, C], or floats from 0 to 1; C is 1, 3 or 4. It may be on the device, and is not waited for.
        """
        for buffer in self.log_buffers():
            buffer.put_image(name, data, self.trainer.iter)

    def put_histogram(self, name: str, data: Any) -> None:
        """Has the writers write how the elements of an array of real numbers are distributed; see `put_image`."""
        for buffer in self.log_buffers():
            buffer.put_histogram(name, data, self.trainer.iter)

    def log_buffers(self) -> list[LogBuffer]:
        """What waits for the writers, of each PeriodicLogger of the run."""
        found = [getattr(hook, "buffer", None) for hook in self.trainer.hooks]
        return [buffer for buffer in found if isinstance(buffer, LogBuffer)]

    def on_failure(self, runner: Runner) -> None:
        """Training has ended with an error, which goes on: `after_train` is called all the same."""
        if "after_train" in self.get_triggered_stages():
            try:
                self.after_train(runner)
            except Exception as error:  # the reason why training ended must not be lost over it
                runner.logger.error(f"{type(self).__name__}.after_train failed: {type(error).__name__}: {error}")


def _with_arguments(cls: type, stage: str, method: Callable[[Any], None]) -> Callable[..., None]:
    """The method as the Runner calls it; called without arguments (`super().before_train()`) it is as written."""
    if len(inspect.signature(method).parameters) != 1:
        raise TypeError(
            f"{cls.__name__}.{stage} takes no arguments besides self, for {cls.__name__} is a HookBase: the run is at "
            "self.trainer; derive from jengine.hooks.Hook for methods that get the runner"
        )

    @functools.wraps(method)
    def call(
        self: HookBase,
        runner: Runner | None = None,
        batch_idx: int | None = None,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """The method as the Runner calls it, with the run within reach."""
        if runner is None:
            return method(self)
        if stage.endswith("_epoch") and not runner.train_loop.by_epoch:
            return None
        self.bind(runner)
        if batch_idx is not None:
            self.inner_iter, self.outputs = batch_idx, outputs
        return method(self)

    return call


def register_hooks(runner: Runner, hooks: Iterable[HookBase | None]) -> None:
    """Adds built hooks to a run and gives each its `trainer`; None among them is skipped.

    Raises:
      AssertionError: one of them is no HookBase.
    """
    for hook in hooks:
        if hook is None:
            continue
        if not isinstance(hook, HookBase):
            raise AssertionError(f"a hook of iMIX is a HookBase, found {type(hook).__name__}: {hook!r}")
        hook.bind(runner)
        runner.register_hook(hook)
