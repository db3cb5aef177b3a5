"""Finds what a hook needs of a model, and says what is missing where it is not there."""

from collections.abc import Callable
from typing import Any

import jax

from jengine import paths
from jengine.errors import closest

PyTree = Any


def model_attribute(model: Any, name: str, needed_by: str) -> Any:
    """The attribute `name` of a model, or of what it wraps (`LinenModel.module`, the model under a precision policy).

    Args:
      model: where to look first.
      name: of the attribute.
      needed_by: the hook that asks, for the message.

    Raises:
      AssertionError: none of them has it.
    """
    found, looked_at = model, []
    while found is not None:
        if hasattr(found, name):
            return getattr(found, name)
        looked_at.append(type(found).__name__)
        found = getattr(found, "model", None) or getattr(found, "module", None)
    raise AssertionError(
        f"{needed_by} needs a model with the attribute {name!r}; {' around '.join(looked_at)} has none: set "
        f"`model.{name}`, or derive a model that has it"
    )


def state_entry(model_state: PyTree, name: str, needed_by: str, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The one part of the model's state that is called `name`, wherever it lies.

    Args:
      model_state: the model's state.
      name: the last component of its path.
      needed_by: the hook that asks, for the message.
      is_leaf: what counts as one part, see `jax.tree.map`.

    Raises:
      AssertionError: there is none, or more than one.
    """
    leaves = jax.tree_util.tree_flatten_with_path(model_state, is_leaf=is_leaf)[0]
    there = {paths.dotted(path): leaf for path, leaf in leaves}
    found = [leaf for path, leaf in there.items() if path.split(".")[-1] == name]
    if len(found) != 1:
        what = f"{len(found)} of that name" if found else f"none{closest(name, there)}"
        raise AssertionError(
            f"{needed_by} needs one entry {name!r} in the model's state (what `init` returns beside the parameters); "
            f"there is {what}"
        )
    return found[0]


def with_state_entry(
    model_state: PyTree, name: str, value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """The model's state with `value` in the place of the part called `name`; see `state_entry`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: value if paths.dotted(path).split(".")[-1] == name else leaf, model_state, is_leaf=is_leaf
    )
