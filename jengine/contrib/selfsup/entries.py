"""Finds what a hook needs of a model, and says what is missing where it is not there."""

from typing import Any

import jax

from jengine import paths
from jengine.contrib.selfsup.memory_bank import MemoryBank
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


def state_entry(model_state: PyTree, name: str, needed_by: str) -> Any:
    """The one array of the model's state that is called `name`, wherever it lies.

    Args:
      model_state: the model's state.
      name: the last component of its path.
      needed_by: the hook that asks, for the message.

    Raises:
      AssertionError: there is none, or more than one.
    """
    there = paths.flatten(model_state)
    found = [leaf for path, leaf in there.items() if path.split(".")[-1] == name]
    if len(found) != 1:
        what = f"are {len(found)}" if found else f"is none{closest(name, there)}"
        raise AssertionError(
            f"{needed_by} needs one entry {name!r} in the model's state (what `init` returns beside the parameters); "
            f"there {what}"
        )
    return found[0]


def with_state_entry(model_state: PyTree, name: str, value: jax.Array) -> PyTree:
    """The model's state with `value` in the place of the array called `name`; see `state_entry`."""
    return paths.map_with_path(lambda path, leaf: value if path.split(".")[-1] == name else leaf, model_state)


def memory_bank(model_state: PyTree, needed_by: str) -> MemoryBank:
    """The one memory bank in the model's state, wherever it lies.

    Args:
      model_state: the model's state.
      needed_by: the hook that asks, for the message.

    Raises:
      AssertionError: there is none, or more than one.
    """
    found = [leaf for leaf in jax.tree.leaves(model_state, is_leaf=is_bank) if is_bank(leaf)]
    if len(found) != 1:
        raise AssertionError(
            f"{needed_by} needs one MemoryBank in the model's state, found {len(found) or 'none'}: let the model's "
            "`init` make it with `empty_bank`"
        )
    return found[0]


def with_memory_bank(model_state: PyTree, bank: MemoryBank) -> PyTree:
    """The model's state with `bank` in the place of the one it has."""
    return jax.tree.map(lambda leaf: bank if is_bank(leaf) else leaf, model_state, is_leaf=is_bank)


def is_bank(part: Any) -> bool:
    """Whether a part of a pytree is a memory bank."""
    return isinstance(part, MemoryBank)


def put_beside(new: PyTree, old: PyTree) -> PyTree:
    """The arrays of `new` where those of `old` lie among the devices."""
    return jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), new, old)
