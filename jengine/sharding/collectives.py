"""What the devices of a compiled program exchange: read from its text, without running it."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_ARRAY = re.compile(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) .*\{$")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*?)\)(.*)$")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"calls=%([\w.-]+)")
_INDEX = re.compile(r"index=(\d+)")
_IN_PAIRS = ("all-gather", "collective-permute")  # started, they name what they take and what they give
_SAME_ELEMENTS = ("bitcast", "copy", "convert", "reshape", "transpose", "all-reduce-done")
_TRIPS = {"all-reduce": 2}  # an all-reduce is a reduce-scatter and an all-gather


class Collective(NamedTuple):
    """One exchange between devices."""

    kind: str  # one of KINDS
    arrays: int  # arrays in it: XLA joins what does not depend on each other
    size: int  # bytes of them on one device: of its result, before a reduce-scatter of what it takes

    @property
    def traffic(self) -> int:
        """Bytes that a device sends, on many devices: twice the size of an all-reduce, once that of any other."""
        return _TRIPS.get(self.kind, 1) * self.size


class _Operation(NamedTuple):
    name: str
    result: tuple[int, ...]  # bytes of each array
    code: str  # what it does: 'dot', 'all-reduce-start'
    operands: tuple[str, ...]
    called: str  # the computation of a fusion, else ''
    position: int  # of a parameter or of an element of a tuple, else -1


def collectives(text: str) -> list[Collective]:
    """The exchanges of a compiled program, in order; those in a loop stand once.

    An all-reduce of which every device uses only a part is a reduce-scatter: XLA divides gradients in this form, and
    leaves it to each backend to join the two, which CPU does not.

    Args:
      text: `jax.jit(f).lower(...).compile().as_text()`.
    """
    program = _Program(text)
    found = []
    for operation in program.operations.values():
        kind = operation.code.removesuffix("-start")
        if kind not in KINDS:
            continue
        sizes = operation.result
        if kind != operation.code and kind in _IN_PAIRS:
            sizes = sizes[len(sizes) // 2 :] if kind == "all-gather" else sizes[1:2]
        if kind == "reduce-scatter":
            sizes = program.taken(operation) or sizes
        divided = program.used_in_parts(operation) if kind == "all-reduce" else [False] * len(sizes)
        for one_kind, chosen in (("reduce-scatter", True), (kind, False)):
            these = [size for size, in_parts in zip(sizes, divided, strict=True) if in_parts is chosen]
            if these:
                found.append(Collective(one_kind, len(these), sum(these)))
    return found


def traffic(exchanges: Iterable[Collective]) -> int:
    """Bytes that a device sends in all of them."""
    return sum(one.traffic for one in exchanges)


class _Program:
    """The operations of a compiled program by name, and who uses what."""

    def __init__(self, text: str) -> None:
        self.operations: dict[str, _Operation] = {}
        self._users: defaultdict[str, list[_Operation]] = defaultdict(list)
        self._parameters: dict[tuple[str, int], str] = {}  # (computation, index) -> name
        self._computations: dict[str, str] = {}  # name of a parameter -> its computation
        self._callers: defaultdict[str, list[_Operation]] = defaultdict(list)
        computation = ""
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                computation = header[1]
            elif parts := _OPERATION.match(line):
                operation = _read(*parts.groups())
                self.operations[operation.name] = operation
                for operand in set(operation.operands):
                    self._users[operand].append(operation)
                if operation.code == "parameter":
                    self._parameters[computation, operation.position] = operation.name
                    self._computations[operation.name] = computation
                if operation.called:
                    self._callers[operation.called].append(operation)

    def taken(self, operation: _Operation) -> tuple[int, ...]:
        """Bytes of each array that an operation takes; none if the text does not tell."""
        return tuple(
            size for name in operation.operands if name in self.operations for size in self.operations[name].result
        )

    def used_in_parts(self, operation: _Operation) -> list[bool]:
        """Whether of each array of the result a device uses nothing but a part of its own."""
        count = len(operation.result)
        elements: list[list[str]] = [[] for _ in range(count)]
        for user in self._users[operation.name] if count > 1 else ():
            if user.code in _SAME_ELEMENTS:  # the end of an operation that was started
                return self.used_in_parts(user)
            if user.code != "get-tuple-element":
                return [False] * count
            elements[user.position].append(user.name)
        if count == 1:
            elements = [[operation.name]]
        return [bool(names) and all(map(self._only_sliced, names)) for names in elements]

    def _only_sliced(self, name: str) -> bool:
        users = self._users[name]
        return bool(users) and all(self._slices(user, name) for user in users)

    def _slices(self, user: _Operation, name: str) -> bool:
        if user.code == "dynamic-slice":
            return user.operands[0] == name and self._differs(user.operands[1:])
        if user.code == "fusion":
            inside = [self._parameters[user.called, i] for i, operand in enumerate(user.operands) if operand == name]
            return all(map(self._only_sliced, inside))
        return user.code in _SAME_ELEMENTS and self._only_sliced(user.name)

    def _differs(self, names: Sequence[str]) -> bool:
        """Whether values are computed from the number of the device."""
        seen: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            operation = self.operations.get(name)
            if operation is None or name in seen:
                continue
            seen.add(name)
            if operation.code in ("partition-id", "replica-id"):
                return True
            if operation.code == "parameter":
                callers = self._callers[self._computations[name]]
                waiting += [caller.operands[operation.position] for caller in callers]
            waiting += operation.operands
        return False


def _read(name: str, result: str, code: str, operands: str, rest: str) -> _Operation:
    """An operation from the parts of its line."""
    sizes = tuple(_size(bits, shape) for _, bits, shape in _ARRAY.findall(result))
    called, index = _CALLED.search(rest), _INDEX.search(rest)
    number = int(operands) if code == "parameter" else int(index[1]) if index else -1
    return _Operation(name, sizes, code, tuple(_NAME.findall(operands)), called[1] if called else "", number)


def _size(bits: str, shape: str) -> int:
    """Bytes of an array; a `pred` has no bits in its name and takes a byte an element."""
    return math.prod(int(size) for size in shape.split(",") if size) * int(bits or 8) // 8
