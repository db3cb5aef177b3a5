"""What the devices of a compiled program exchange: read from its text, without running it."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_OPERATION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
_IN_PAIRS = ("all-gather", "collective-permute")  # started, they name what they take and what they give
_TRIPS = {"all-reduce": 2}  # an all-reduce is a reduce-scatter and an all-gather


class Collective(NamedTuple):
    """One exchange between devices."""

    kind: str  # one of KINDS
    arrays: int  # arrays in it: XLA joins what does not depend on each other
    size: int  # bytes of its result on one device

    @property
    def traffic(self) -> int:
        """Bytes that a device sends, on many devices: twice the size of an all-reduce, once that of any other."""
        return _TRIPS.get(self.kind, 1) * self.size


def collectives(text: str) -> list[Collective]:
    """The exchanges of a compiled program, in order; those in a loop stand once.

    Args:
      text: `jax.jit(f).lower(...).compile().as_text()`.
    """
    found = []
    for result, kind, started in _OPERATION.findall(text):
        sizes = [_size(bits, shape) for _, bits, shape in _ARRAY.findall(result)]
        if started and kind in _IN_PAIRS:
            sizes = sizes[len(sizes) // 2 :] if kind == "all-gather" else sizes[1:2]
        found.append(Collective(kind, len(sizes), sum(sizes)))
    return found


def traffic(exchanges: Iterable[Collective]) -> int:
    """Bytes that a device sends in all of them."""
    return sum(one.traffic for one in exchanges)


def _size(bits: str, shape: str) -> int:
    """Bytes of an array; a `pred` has no bits in its name and takes a byte an element."""
    return math.prod(int(size) for size in shape.split(",") if size) * int(bits or 8) // 8
