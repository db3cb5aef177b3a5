"""Attributes of the model that are hyperparameters: numbers that hooks assign during training."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jengine.model.model import Model, ModelWrapper, is_number
from jengine.optim.wrapper_dict import AnyWrapper, wrappers_by_name


def optimizer_names(optim_wrapper: AnyWrapper) -> set[str]:
    """Return the hyperparameters of all optimizers, and the names of several optimizers."""
    wrappers = wrappers_by_name(optim_wrapper)
    return {*wrappers, *(name for wrapper in wrappers.values() for name in wrapper.hyperparams)}


def list_models(model: Model | None) -> Iterator[Model]:
    """Yield a model and the models inside its wrappers."""
    while model is not None:
        yield model
        model = model.model if isinstance(model, ModelWrapper) else None


def plain_attributes(model: Model) -> tuple[tuple[str, Any], ...]:
    """Return the numbers, strings and bools among the attributes, for which predictions compile."""
    pairs = (pair for each in list_models(model) for pair in vars(each).items())
    return tuple(pair for pair in pairs if isinstance(pair[1], int | float | str | np.number))


@contextlib.contextmanager
def hyperparams_as_attributes(
    model: Model, hyperparams: Mapping[str, Any] = {}, optim_wrapper: AnyWrapper | None = None
) -> Iterator[None]:
    """Let attributes of the model that are numbers be the hyperparameters of the same names.

    For the trace of a step: a new value holds from the next step on. Hyperparameters of the
    optimizers, such as 'momentum', are never attributes. What the trace assigns is not followed.
    """
    names = hyperparams.keys() - (() if optim_wrapper is None else optimizer_names(optim_wrapper))
    with contextlib.ExitStack() as stack:
        for each in list_models(model):
            stack.enter_context(_replaced(each, names, hyperparams))
        yield


@contextlib.contextmanager
def _replaced(model: Model, names: Iterable[str], hyperparams: Mapping[str, Any]) -> Iterator[None]:
    attributes = vars(model)
    follower = attributes.pop("_follower", None)
    own = {name: x for name in names if is_number(x := getattr(model, name, None))}
    inherited = own.keys() - attributes.keys()  # from the class
    try:
        for name in own:
            object.__setattr__(model, name, hyperparams[name])  # through a property, too
        yield
    finally:
        for name, value in own.items():
            object.__setattr__(model, name, value)
        for name in inherited:
            attributes.pop(name, None)
        if follower is not None:
            attributes["_follower"] = follower


def reads_attributes(
    loss: Callable[..., Any], model: Model, optim_wrapper: AnyWrapper
) -> Callable[..., Any]:
    """Return a loss, which takes `hyperparams` by keyword, that reads them as attributes too."""

    @functools.wraps(loss)
    def call(*args: Any, hyperparams: Mapping[str, Any], **kwargs: Any) -> Any:
        with hyperparams_as_attributes(model, hyperparams, optim_wrapper):
            return loss(*args, hyperparams=hyperparams, **kwargs)

    return call
