"""Arrays packed into one for each dtype: a compiled function pays for every argument.

A call with three arrays of one number each, beside the state, takes a fifth longer than one with them all in one array.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.paths import dotted

PyTree = Any


class Place(NamedTuple):
    """Where a leaf lies in the packed arrays.

    Attributes:
      array: in which of them.
      start, stop: the elements that are its own.
      shape: its shape.
    """

    array: int
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Layout:
    """How leaves lie in packed arrays.

    Attributes:
      treedef: of the leaves.
      dtypes: of the packed arrays.
      sizes: their elements.
      places: of the leaves, None for those that are not packed: they are no arrays of the host.
    """

    treedef: Any
    dtypes: tuple[np.dtype, ...]
    sizes: tuple[int, ...]
    places: tuple[Place | None, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any], treedef: Any, rows: bool = False) -> "Layout":
        """The layout for leaves of these shapes and dtypes.

        Args:
          leaves: the leaves.
          treedef: of them.
          rows: whether their first axis is that of the iterations.
        """
        sizes: dict[np.dtype, int] = {}
        places: list[Place | None] = []
        for leaf in leaves:
            if not isinstance(leaf, np.ndarray | np.generic):
                places.append(None)
                continue
            shape = leaf.shape[1:] if rows else leaf.shape
            start = sizes.setdefault(leaf.dtype, 0)
            sizes[leaf.dtype] = stop = start + math.prod(shape)
            places.append(Place(list(sizes).index(leaf.dtype), start, stop, shape))
        return cls(treedef, tuple(sizes), tuple(sizes.values()), tuple(places))

    def __repr__(self) -> str:
        leaves = jax.tree_util.tree_flatten_with_path(self.treedef.unflatten(range(len(self.places))))[0]
        return ", ".join(f"{dotted(path)} {self._form(self.places[i])}" for path, i in leaves)

    def _form(self, place: Place | None) -> str:
        return "by itself" if place is None else f"{self.dtypes[place.array]}{list(place.shape)}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(slots=True)
class Packed:
    """Leaves in packed arrays; a pytree.

    Attributes:
      arrays: one for each dtype of the layout, [elements]; [rows, elements] for several iterations.
      rest: the leaves that are not packed.
      layout: how the leaves lie in them.
    """

    arrays: tuple[Any, ...]
    rest: tuple[Any, ...]
    layout: Layout = dataclasses.field(metadata={"static": True})


def pack(leaves: Sequence[Any], treedef: Any) -> Packed:
    """The leaves with all host arrays among them packed, on the host."""
    layout = Layout.of(leaves, treedef)
    arrays = [np.empty((size,), dtype) for dtype, size in zip(layout.dtypes, layout.sizes, strict=True)]
    rest = []
    for leaf, place in zip(leaves, layout.places, strict=True):
        if place is None:
            rest.append(leaf)
        else:
            arrays[place.array][place.start : place.stop] = leaf.reshape(-1)
    return Packed(tuple(arrays), tuple(rest), layout)


def pack_rows(columns: PyTree, size: int) -> Packed:
    """Numbers of several iterations packed.

    Args:
      columns: host arrays with a row for each iteration.
      size: the rows of the packed arrays; those that no iteration has hold anything.
    """
    leaves, treedef = jax.tree.flatten(columns)
    layout = Layout.of(leaves, treedef, rows=True)
    tables = [np.empty((size, stop), dtype) for dtype, stop in zip(layout.dtypes, layout.sizes, strict=True)]
    for leaf, place in zip(leaves, layout.places, strict=True):
        assert place is not None
        tables[place.array][: len(leaf), place.start : place.stop] = leaf.reshape(len(leaf), -1)
    return Packed(tuple(tables), (), layout)


def pack_as(leaves: Sequence[jax.Array], layout: Layout) -> Packed:
    """The leaves packed as they were before, within a compiled function."""
    pieces: list[list[jax.Array]] = [[] for _ in layout.dtypes]
    rest = []
    for leaf, place in zip(leaves, layout.places, strict=True):
        if place is None:
            rest.append(leaf)
        else:
            pieces[place.array].append(leaf.reshape(-1))
    return Packed(tuple(map(jnp.concatenate, pieces)), tuple(rest), layout)


def take(arrays: Sequence[Any], places: Sequence[Place]) -> list[Any]:
    """What lies at these places: parts of arrays of the host, or within a compiled function."""
    return [arrays[place.array][place.start : place.stop].reshape(place.shape) for place in places]


def unpack(tree: PyTree, take: Callable[[Sequence[Any], Sequence[Place]], Sequence[Any]] = take) -> PyTree:
    """The tree as it was before it was packed, of arrays without rows; others pass as they are.

    Args:
      tree: what may be packed.
      take: see `take`.
    """
    if not isinstance(tree, Packed):
        return tree
    places = tree.layout.places
    packed = iter(take(tree.arrays, [place for place in places if place is not None]))
    rest = iter(tree.rest)
    return tree.layout.treedef.unflatten([next(rest if place is None else packed) for place in places])
