"""Hashes of what a compiled program computes, to detect that it has changed since a checkpoint."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jengine.config.description import describe_array, hash_text

PyTree = Any

# an address in memory, or a line of a file
_LOCATION = re.compile(r" at (0x[0-9a-f]+|[^\s\]]+:\d+)")
_SET = re.compile(r"(?<=\{)'[^{}]*'(?=\})")  # whose order depends on the hash seed of the process


def hash_jaxpr(closed: Any) -> str:
    """Return a hash of a traced function with its constants, which is the same in every process."""
    text = _SET.sub(
        lambda names: ", ".join(sorted(names[0].split(", "))), _LOCATION.sub("", str(closed.jaxpr))
    )
    return hash_text("\n".join([text, *map(str, _constants(closed))]))


def hash_shapes(tree: PyTree) -> str:
    """Return a hash of a pytree's structure, shapes and dtypes.

    >>> hash_shapes({"w": np.zeros(3)}) == hash_shapes({"w": np.ones(3)})
    True
    """
    leaves, treedef = jax.tree.flatten(tree)
    return hash_text(f"{treedef} {[(leaf.shape, str(leaf.dtype)) for leaf in leaves]}")


def _constants(jaxpr: Any) -> Iterator[Any]:
    """Yield descriptions of all constants in a jaxpr, nested ones included."""
    for const in getattr(jaxpr, "consts", ()):
        if isinstance(const, jax.Array) and const.is_fully_addressable:
            const = np.asarray(const)
        yield describe_array(const) if hasattr(const, "dtype") else repr(const)
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for inner in inner_jaxprs(eqn.params):
            yield from _constants(inner)


def inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs in equation parameters."""
    for value in params.values():
        # a cond has a list of branches
        for item in value if isinstance(value, tuple | list) else [value]:
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item
