"""The model as the step calls it: numbers that hooks assign are inputs, and what is read
otherwise is recorded.
"""

import abc
import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jengine.model.model import Model
from jengine.optim.wrapper_dict import AnyWrapper, wrappers_by_name
from jengine.train.traced_reads import RecordedScalars, check_reads, list_changed, record_reads

# whose objects nobody changes during training
_LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "optax", "numpy")
_MAX_ITEMS = 1000  # of a list that is searched for loss objects; a longer one is data
_LOCK = threading.RLock()  # a model may predict in several threads
_INSTEAD = (
    "Set a number in runner.hyperparams, first in before_train, under a name that no "
    "hyperparameter of the optimizer "
    "has, and read it from `hyperparams` in the loss instead of NAME"
)


class TracedModel:
    """Model whose losses or predictions a step traces.

    In a trace, an attribute of the model that is a number and has the name of a hyperparameter that
    a hook has set is that hyperparameter, so that a new value holds from the next step on. Other
    attributes that the trace reads, from the model or from a loss object that it holds, must keep
    their values.

    Args:
      model: the model, with its wrappers.
      optim_wrapper: has the hyperparameters that are never attributes of the model, such as
        'momentum'; None for a step without an optimizer.

    Attributes:
      hyperparams_read: names of the hyperparameters that losses have read, also as attributes.
    """

    def __init__(self, model: Model, optim_wrapper: AnyWrapper | None = None) -> None:
        self._model = model
        self._optim_wrapper = optim_wrapper
        self._reads: dict[int, tuple[Any, dict[str, Any]]] = {}  # by the ID of the object
        self._inputs: set[tuple[int, str]] = set()  # attributes that traces have replaced
        self.hyperparams_read: set[str] = set()

    def wrap(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loss of the model, which takes `hyperparams` by keyword, for the trace of a
        step.
        """

        @functools.wraps(loss)
        def call(*args: Any, hyperparams: Mapping[str, Any], **kwargs: Any) -> Any:
            with self.trace(hyperparams) as recorded:
                return loss(*args, hyperparams=recorded, **kwargs)

        return call

    def record(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step without hyperparameters, such as one that predicts, for its trace."""

        @functools.wraps(step)
        def call(*args: Any) -> Any:
            with self.trace({}):
                return step(*args)

        return call

    @contextlib.contextmanager
    def trace(self, hyperparams: Mapping[str, Any]) -> Iterator[RecordedScalars]:
        """Let the model read the hyperparameters inside.

        Yield them for its argument of that name.
        """
        recorded = RecordedScalars(hyperparams, self.hyperparams_read)
        names = hyperparams.keys() - optimizer_names(self._optim_wrapper) if hyperparams else set()
        with _LOCK, contextlib.ExitStack() as stack:
            owners = _list_owners(self._model)
            used = _list_all_inputs(owners, names)
            # all programs are traced anew, and maybe read less, as behind a property
            if not used <= self._inputs:
                self._reads.clear()
                self._inputs |= used
            for owner in owners:
                _, reads = self._reads.setdefault(id(owner), (owner, {}))
                stack.enter_context(_unfollowed(owner))
                stack.enter_context(
                    record_reads(owner, reads, _Inputs(recorded, _list_inputs(owner, names)))
                )
            try:
                yield recorded
            except jax.errors.JAXTypeError as error:
                if used:
                    error.add_note(
                        f"hooks assign the attributes {sorted(name for _, name in used)} of the "
                        "model during training, so that they are arrays in the step, for which "
                        "Python's `if` and `range` have no value: use jnp.where or jax.lax.cond"
                    )
                raise

    def has_changed(self) -> bool:
        """Return whether an attribute that a trace has read has changed since."""
        return any(list_changed(owner, reads) for owner, reads in self._reads.values())

    def has_read(self, name: str) -> bool:
        """Return whether a trace has read the attribute `name` as a value that the step keeps."""
        return any(name in reads for _, reads in self._reads.values())

    def check_unchanged(self, hyperparams: Mapping[str, Any]) -> None:
        """Check that no attribute that a trace has read has changed since, but for those that
        are hyperparameters.
        """
        names = hyperparams.keys() - optimizer_names(self._optim_wrapper)
        if (
            not _list_all_inputs([owner for owner, _ in self._reads.values()], names)
            <= self._inputs
        ):
            return  # the next call traces anew
        for owner, reads in self._reads.values():
            check_reads(owner, reads, _INSTEAD)


class _Inputs(dict[str, Any]):
    """Attributes of a model that are hyperparameters, which are recorded when they are read."""

    def __init__(self, hyperparams: RecordedScalars, names: set[str]) -> None:
        super().__init__(dict.fromkeys(names))
        self._hyperparams = hyperparams

    def __getitem__(self, name: str) -> Any:
        return self._hyperparams[name]


def is_number(value: Any) -> bool:
    """Return whether a value is a number on the host.

    >>> [is_number(value) for value in (1, 0.5, np.float32(2), True, "1")]
    [True, True, True, False, False]
    """
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def optimizer_names(optim_wrapper: AnyWrapper | None) -> set[str]:
    """Return the hyperparameters of all optimizers, and the names of several optimizers."""
    wrappers = {} if optim_wrapper is None else wrappers_by_name(optim_wrapper)
    return {*wrappers, *(name for wrapper in wrappers.values() for name in wrapper.hyperparams)}


def _list_inputs(owner: Any, names: Iterable[str]) -> set[str]:
    """Return the hyperparameters that are attributes of a model."""
    return (
        {name for name in names if is_number(getattr(owner, name, None))}
        if _is_model(owner)
        else set()
    )


def _list_all_inputs(owners: Iterable[Any], names: Iterable[str]) -> set[tuple[int, str]]:
    """Return the inputs of several objects, with the ID of the object."""
    return {(id(owner), name) for owner in owners for name in _list_inputs(owner, names)}


def _is_model(owner: Any) -> bool:
    return callable(getattr(type(owner), "loss", None))


@contextlib.contextmanager
def _unfollowed(owner: Any) -> Iterator[None]:
    """Let the model assign its attributes inside, in a trace, as it likes.

    See `Model.__setattr__`.
    """
    attributes = getattr(owner, "__dict__", {})
    follower = attributes.pop("_follower", None)
    try:
        yield
    finally:
        if follower is not None:
            attributes["_follower"] = follower


def _list_owners(model: Any) -> list[Any]:
    """Return the model, the models inside it, and the loss objects that they hold, at any depth."""
    owners: dict[int, Any] = {id(model): model}
    stack = [model]
    while stack:
        for value in list(getattr(stack.pop(), "__dict__", {}).values()):
            for item in _list_items(value):
                owner = _find_owner(item)
                if owner is not None and id(owner) not in owners:
                    owners[id(owner)] = owner
                    stack.append(owner)
    return list(owners.values())


def _list_items(value: Any) -> list[Any]:
    if not isinstance(value, dict | list | tuple):
        return [value]
    return (
        []
        if len(value) > _MAX_ITEMS
        else list(value.values() if isinstance(value, dict) else value)
    )


def _find_owner(item: Any) -> Any:
    """Return a model, a callable object such as a loss, or the object whose method `item` is.

    None for others.
    """
    while isinstance(item, functools.partial):
        item = item.func
    if isinstance(item, types.MethodType):
        item = item.__self__
    elif not (callable(item) or _is_model(item)):
        return None
    if isinstance(item, type) or not hasattr(item, "__dict__"):
        return None
    # A class of a library's metaclass, as of Linen modules, cannot have another one for a while
    is_foreign = any(cls.__module__.partition(".")[0] in _LIBRARIES for cls in type(item).__mro__)
    return None if is_foreign or type(type(item)) not in (type, abc.ABCMeta) else item
