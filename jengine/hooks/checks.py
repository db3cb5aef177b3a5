"""Check the loss and the number of classes."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jengine.annotations import Count
from jengine.errors import ConfigError
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class CheckInvalidLossHook(Hook):
    """Check the loss every `interval` training iterations, waiting for it, and end training if it is not finite.

    It detects an error late and saves nothing. `NumericsGuardHook` checks every step and skips the bad ones.

    Args:
      interval: iterations from one check to the next.

    Raises:
      AssertionError: from the hook, the loss is infinite or NaN.
    """

    def __init__(self, interval: Count = 50) -> None:
        self.interval = interval

    def next_step(self, runner: Runner, step: int) -> float:
        """Return the step of the next check."""
        return self.next_multiple(self.interval, step)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Check the loss if it is due."""
        if outputs and self.every_n_train_iters(runner, self.interval):
            loss = float(outputs["loss"])
            if not np.isfinite(loss):
                runner.logger.error("the loss became infinite or NaN!")
                raise AssertionError(f"the loss is {loss} in iteration {runner.iter}")


@HOOKS.register_module("NumClassCheckHook")
@HOOKS.register_module()
class ClassNumCheckHook(Hook):
    """Checks, before training, validation and test, every module with `num_classes` against the data's `classes`.

    MMDetection's name for it, `NumClassCheckHook`, will do too. The data tell their classes in the `metainfo` of the
    dataset; where they do not there is a warning. Looked at are the model and what its attributes lead to: modules that
    a Flax module makes only within its methods are not.

    Args:
      skip: attributes that are passed over; a region proposal head has a class number of its own.

    Raises:
      ConfigError: from the hook, the numbers differ. TypeError: from the hook, `classes` is a string.
    """

    def __init__(self, skip: Sequence[str] = ("rpn_head",)) -> None:
        self.skip = tuple(skip)

    def before_train(self, runner: Runner) -> None:
        """Checks the training data."""
        self._check(runner, "train")

    def before_val(self, runner: Runner) -> None:
        """Checks the validation data."""
        self._check(runner, "val")

    def before_test(self, runner: Runner) -> None:
        """Checks the test data."""
        self._check(runner, "test")

    def _check(self, runner: Runner, mode: str) -> None:
        meta = getattr(getattr(runner, f"{mode}_dataloader"), "metainfo", None) or {}
        classes = meta.get("classes")
        if classes is None:
            warnings.warn(f"ClassNumCheckHook: the {mode} data have no `classes` in their metainfo", stacklevel=2)
            return
        if isinstance(classes, str):
            raise TypeError(
                f"ClassNumCheckHook: classes is a tuple of names, found the string {classes!r}: ({classes!r},)"
            )
        for path, number in _class_numbers(runner.model, "model", self.skip, set()):
            if number != len(classes):
                raise ConfigError(
                    f"ClassNumCheckHook: {path} is {number}, and the {mode} data have {len(classes)} classes"
                )


def _class_numbers(owner: Any, path: str, skip: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, int]]:
    """Path and value of each attribute `num_classes` that is reached from `owner`."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, Mapping):
        attributes = {f"[{key!r}]": value for key, value in owner.items()}
    elif isinstance(owner, list | tuple):
        attributes = {f"[{index}]": value for index, value in enumerate(owner)}
    elif hasattr(owner, "__dict__") and not isinstance(owner, type) and not callable(getattr(owner, "__get__", None)):
        attributes = {f".{name}": value for name, value in vars(owner).items()}
    else:
        return
    for name, value in attributes.items():
        if name == ".num_classes" and isinstance(value, int):
            yield f"{path}{name}", value
        elif name.strip(".") not in skip:
            yield from _class_numbers(value, f"{path}{name}", skip, seen)
