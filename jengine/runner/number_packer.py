"""Packs the numbers that the host hands to each iteration, and keeps on the device those that do not change.

Each host array that enters a compiled step costs a few microseconds at every call, and each argument one or two. So all
numbers of a dtype travel in one array; and while none of them changes, that array is sent once.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.packed import Packed, pack

_STANDS_AFTER = 3  # calls with the same values, before they are sent: what moves all the time is never sent
_MOST = 1000


class _Standing:
    """A packed array as it was at the latest calls.

    Attributes:
      array: it, on the host.
      calls: how often it has been the same.
      stands_after: calls after which it is sent; more each time that it was sent in vain.
      sent: it on the device.
    """

    __slots__ = ("array", "calls", "sent", "stands_after")

    def __init__(self) -> None:
        self.array: np.ndarray | None = None
        self.calls = 0
        self.stands_after = _STANDS_AFTER
        self.sent: jax.Array | None = None


class NumberPacker:
    """Packs the numbers of one iteration after the other.

    Args:
      put: sends a host array to the device without tying it there, so that nothing is compiled again.
    """

    def __init__(self, put: Callable[[np.ndarray], jax.Array]) -> None:
        self._put = put
        self._leaves: list[Any] = []
        self._packed: Packed | None = None
        self._fixed = False  # whether none of the leaves can change in place
        self._standing: list[_Standing] = []

    def __call__(self, numbers: Mapping[str, Any]) -> Packed:
        """The numbers as the next call takes them: arrays that have not changed for some calls are on the device.

        Args:
          numbers: host arrays by name, or containers of such; anything else passes unpacked.
        """
        packed = self._packed_anew(*jax.tree.flatten(numbers))
        return Packed(tuple(map(self._stand, self._standing, packed.arrays)), packed.rest, packed.layout)

    def _packed_anew(self, leaves: list[Any], treedef: Any) -> Packed:
        """The numbers on the host, in the arrays of the last call where they have not changed."""
        before, packed = self._leaves, self._packed
        if packed is not None and treedef == packed.layout.treedef:
            if self._fixed and all(map(operator.is_, leaves, before)):
                return packed
            moved = [i for i, leaf in enumerate(leaves) if leaf is not before[i] or not _fixed(leaf)]
            packed = _moved(packed, leaves, moved)
        else:
            packed = None
        if packed is None:
            packed = pack(leaves, treedef)
            self._standing = [_Standing() for _ in packed.arrays]
        self._leaves, self._packed, self._fixed = leaves, packed, all(map(_fixed, leaves))
        return packed

    def _stand(self, kept: _Standing, array: np.ndarray) -> Any:
        if kept.array is not array:
            if kept.sent is not None:  # to send it costs as much as twenty calls with an array of the host
                kept.stands_after = min(4 * kept.stands_after, _MOST)
            kept.array, kept.calls, kept.sent = array, 0, None
        if kept.sent is None:
            kept.calls += 1
            if kept.calls <= kept.stands_after:
                return array
            kept.sent = self._put(array)
        return kept.sent


def _fixed(leaf: Any) -> bool:
    """Whether the same object means the same value."""
    return not isinstance(leaf, np.ndarray) or not leaf.flags.writeable


def _moved(packed: Packed, leaves: Sequence[Any], moved: Sequence[int]) -> Packed | None:
    """With the leaves `moved` anew; None where one of them has another form. Equal values leave their array."""
    layout, arrays = packed.layout, list(packed.arrays)
    for i in moved:
        leaf, place = leaves[i], layout.places[i]
        if place is None:
            if isinstance(leaf, np.ndarray | np.generic):
                return None
            continue
        array = arrays[place.array]
        if getattr(leaf, "shape", None) != place.shape or leaf.dtype != array.dtype:
            return None
        if array is packed.arrays[place.array]:
            if array[place.start : place.stop].tobytes() == leaf.tobytes():
                continue
            array = arrays[place.array] = array.copy()  # a step that is still to run may read the other
        array[place.start : place.stop] = leaf if leaf.ndim < 2 else leaf.ravel()
    rest = tuple(leaf for leaf, place in zip(leaves, layout.places, strict=True) if place is None)
    if rest == () and all(map(lambda new, old: new is old, arrays, packed.arrays)):
        return packed
    return Packed(tuple(arrays), rest, layout)
