"""Read the entries of batches and predictions that the arguments of a metric or a hook name."""

from collections.abc import Mapping
from typing import Any

from jengine.errors import UnknownNameError, closest


def read_predictions(outputs: Any, name: str | None, owner: str) -> Any:
    """Return the predictions: the outputs of the model, or one of their entries if they are a dict.

    Args:
      outputs: what the model's `predict` returned.
      name: the owner's argument `prediction`; None for outputs that are not a dict.
      owner: name of the metric or hook, for the error message.

    Raises:
      KeyError: the outputs do not have the entry.
    """
    if isinstance(outputs, Mapping):
        return read_entry(outputs, name, "prediction", owner)
    if name is not None:
        raise UnknownNameError(f"{owner}: `prediction` must be None unless predictions are a dict, got {name!r}")
    return outputs


def read_entry(tree: Any, name: str | None, argument: str, owner: str) -> Any:
    """Return `tree[name]`.

    Args:
      tree: the batch or the predictions.
      name: name of the entry.
      argument: the owner's argument that sets the name, for the error message.
      owner: name of the metric or hook, for the error message.

    Raises:
      KeyError: there is no such entry.
    """
    entries = tree if isinstance(tree, Mapping) else {}
    if name is None or name not in entries:
        raise UnknownNameError(
            f"{owner}: `{argument}` must be the name of an entry, got {name!r}{closest(name or '', entries)}"
        )
    return entries[name]
