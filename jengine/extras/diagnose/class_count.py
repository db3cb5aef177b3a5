"""Check that a model has as many classes as the data."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Loader, RunnerProtocol


@HOOKS.register_module("NumClassCheckHook")
@HOOKS.register_module()
class ClassNumCheckHook(Hook):
    """Comparison of every `num_classes` in the model with the `classes` in the data, before each
    loop starts.

    MMDetection's name, `NumClassCheckHook`, works too. The classes are read from the dataset's
    `metainfo`; without them the hook warns. It visits the model and everything that attributes
    refer to, but not modules that a Flax module creates within methods.

    Args:
      skip: attribute names to ignore; a region proposal head, for example, has another number of
        classes.
    """

    def __init__(self, skip: Sequence[str] = ("rpn_head",)) -> None:
        self.skip = tuple(skip)

    def before_train(self, runner: RunnerProtocol) -> None:
        """Check the training data."""
        self._check(runner.model, "train", runner.train_dataloader)

    def before_val(self, runner: RunnerProtocol) -> None:
        """Check the validation data."""
        self._check_all(runner.model, "val", runner.val_dataloader)

    def before_test(self, runner: RunnerProtocol) -> None:
        """Check the test data."""
        self._check_all(runner.model, "test", runner.test_dataloader)

    def _check_all(self, model: Any, mode: str, loaders: Loader | dict[str, Loader]) -> None:
        for name, loader in loaders.items() if isinstance(loaders, dict) else [("", loaders)]:
            self._check(model, f"{mode} {name}".rstrip(), loader)

    def _check(self, model: Any, mode: str, loader: Any) -> None:
        classes = (loader.metainfo or {}).get("classes")
        if classes is None:
            warnings.warn(
                f"ClassNumCheckHook: the {mode} data have no `classes` in their metainfo",
                stacklevel=2,
            )
            return
        if isinstance(classes, str):  # `len` would count the letters
            raise TypeError(
                f"ClassNumCheckHook: classes must be a tuple of names, got {classes!r}; did you "
                f"mean ({classes!r},)?"
            )
        for path, number in _find_num_classes(model, "model", self.skip, set()):
            if number != len(classes):
                raise ConfigError(
                    f"ClassNumCheckHook: {path} must be {len(classes)}, the number of classes of "
                    f"the {mode} data, got {number}"
                )


NumClassCheckHook = ClassNumCheckHook


def _find_num_classes(
    owner: Any, path: str, skip: tuple[str, ...], visited: set[int]
) -> Iterator[tuple[str, int]]:
    """Yield the path and value of each attribute `num_classes` below `owner`."""
    if id(owner) in visited:
        return
    visited.add(id(owner))  # attributes may refer back, as to a parent
    if isinstance(owner, Mapping):
        attributes = {f"[{key!r}]": value for key, value in owner.items()}
    elif isinstance(owner, list | tuple):
        attributes = {f"[{index}]": value for index, value in enumerate(owner)}
    # Classes and functions have a `__dict__` too, but no settings of this model
    elif (
        hasattr(owner, "__dict__") and not isinstance(owner, type) and not hasattr(owner, "__get__")
    ):
        attributes = {f".{name}": value for name, value in vars(owner).items()}
    else:
        return
    for name, value in attributes.items():
        if name == ".num_classes" and isinstance(value, int):
            yield f"{path}{name}", value
        elif name.strip(".") not in skip:
            yield from _find_num_classes(value, f"{path}{name}", skip, visited)
