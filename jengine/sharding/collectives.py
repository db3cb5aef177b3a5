"""Find the collectives of a compiled program in its HLO text, without running it."""

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
_CALLED = re.compile(r"(?:calls|body)=%([\w.-]+)")
_INDEX = re.compile(r"index=(\d+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_SCATTERING = "all-reduce-scatter"  # the computation of a fused reduce-scatter on TPUs
_WITH_OPERANDS = ("all-gather", "collective-permute")  # the result of their start contains the operands too
_SAME_ELEMENTS = ("bitcast", "copy", "convert", "reshape", "transpose", "all-reduce-done")
_TRANSFERS = {"all-reduce": 2}  # a reduce-scatter and an all-gather


class Collective(NamedTuple):
    """Describe one collective operation."""

    kind: str  # one of KINDS
    arrays: int  # number of arrays: XLA combines independent collectives
    size: int  # bytes of the result on one device; of the operands for a reduce-scatter

    @property
    def traffic(self) -> int:
        """The bytes that a device sends, for many devices: twice the size of an all-reduce, once that of others."""
        return _TRANSFERS.get(self.kind, 1) * self.size


class _Operation(NamedTuple):
    name: str
    result: tuple[int, ...]  # bytes of each array
    code: str  # the opcode: 'dot', 'all-reduce-start'
    operands: tuple[str, ...]
    called: str  # the computation of a fusion, the body of a loop, or ''
    position: int  # of a parameter or of a tuple element, or -1
    channel: str  # identifies a collective, or ''
    computation: str  # that contains the operation, or ''


def find_collectives(text: str) -> list[Collective]:
    """Return the collectives of a compiled program, in order; a collective in a loop is listed once.

    An all-reduce of which every device uses only its slice counts as a reduce-scatter: XLA writes sharded gradients in
    this form, and it depends on the backend whether the two are fused; CPU does not. The parts of an asynchronous
    collective that TPUs fuse with computations, each of which contains all of it, are listed once.

    Args:
      text: `jax.jit(f).lower(...).compile().as_text()`.
    """
    program = _Program(text)
    result = []
    owners: dict[str, str] = {}  # channel -> the first computation with a collective of that channel
    for operation in program.operations.values():
        kind = operation.code.removesuffix("-start")
        if kind not in KINDS:
            continue
        if operation.channel and owners.setdefault(operation.channel, operation.computation) != operation.computation:
            continue
        sizes = operation.result
        if kind != operation.code and kind in _WITH_OPERANDS:
            sizes = sizes[len(sizes) // 2 :] if kind == "all-gather" else sizes[1:2]
        if kind == "reduce-scatter":
            sizes = program.operand_sizes(operation) or sizes
        scattered = program.find_scattered(operation) if kind == "all-reduce" else [False] * len(sizes)
        for effective_kind, flag in (("reduce-scatter", True), (kind, False)):
            selected = [size for size, is_scattered in zip(sizes, scattered, strict=True) if is_scattered is flag]
            if selected:
                result.append(Collective(effective_kind, len(selected), sum(selected)))
    return result


def traffic(collectives: Iterable[Collective]) -> int:
    """Return the bytes that a device sends in all collectives."""
    return sum(collective.traffic for collective in collectives)


class _Program:
    """Parse the operations of a compiled program, and the users of each."""

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
                operation = _parse_operation(computation, *parts.groups())
                self.operations[operation.name] = operation
                for operand in set(operation.operands):
                    self._users[operand].append(operation)
                if operation.code == "parameter":
                    self._parameters[computation, operation.position] = operation.name
                    self._computations[operation.name] = computation
                if operation.called:
                    self._callers[operation.called].append(operation)

    def operand_sizes(self, operation: _Operation) -> tuple[int, ...]:
        """Return the bytes of each operand; empty if the text does not contain them."""
        return tuple(
            size for name in operation.operands if name in self.operations for size in self.operations[name].result
        )

    def find_scattered(self, operation: _Operation) -> list[bool]:
        """Return, for each array of the result, whether every device uses only its own slice."""
        count = len(operation.result)
        if operation.computation.startswith(_SCATTERING):
            return [True] * count
        elements: list[list[str]] = [[] for _ in range(count)]
        for user in self._users[operation.name] if count > 1 else ():
            if user.code in _SAME_ELEMENTS:  # the `done` of an asynchronous operation
                return self.find_scattered(user)
            if user.code != "get-tuple-element":
                return [False] * count
            elements[user.position].append(user.name)
        if count == 1:
            elements = [[operation.name]]
        return [bool(names) and all(map(self._is_only_sliced, names)) for names in elements]

    def _is_only_sliced(self, name: str) -> bool:
        users = self._users[name]
        return bool(users) and all(self._is_sliced_by(user, name) for user in users)

    def _is_sliced_by(self, user: _Operation, name: str) -> bool:
        if user.code == "dynamic-slice":
            return user.operands[0] == name and self._depends_on_device(user.operands[1:])
        if user.code == "fusion":
            parameters = [
                self._parameters[user.called, i] for i, operand in enumerate(user.operands) if operand == name
            ]
            return all(map(self._is_only_sliced, parameters))
        return user.code in _SAME_ELEMENTS and self._is_only_sliced(user.name)

    def _depends_on_device(self, names: Sequence[str]) -> bool:
        """Return whether the values depend on the index of the device."""
        seen: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            operation = self.operations.get(name)
            if operation is None or name in seen:
                continue
            seen.add(name)
            if operation.code in ("partition-id", "replica-id"):
                return True
            if operation.code == "parameter":
                callers = self._callers[self._computations[name]]
                pending += [caller.operands[operation.position] for caller in callers if caller.code == "fusion"]
            pending += self._initial_values(operation) if operation.code == "get-tuple-element" else operation.operands
        return False

    def _initial_values(self, element: _Operation) -> Sequence[str]:
        """Return the tuple of an element; of the state of a loop, the element's value before the loop."""
        source = self.operations.get(element.operands[0])
        if source is None or source.code != "parameter":
            return element.operands
        loops = [caller for caller in self._callers[self._computations[source.name]] if caller.code == "while"]
        states = [self.operations[name] for loop in loops for name in loop.operands if name in self.operations]
        return [state.operands[element.position] for state in states if state.code == "tuple"]


def _parse_operation(computation: str, name: str, result: str, code: str, operands: str, rest: str) -> _Operation:
    """Return an operation of a computation from the groups of its line."""
    sizes = tuple(_size(bits, shape) for _, bits, shape in _ARRAY.findall(result))
    called, index, channel = (pattern.search(rest) for pattern in (_CALLED, _INDEX, _CHANNEL))
    position = int(operands) if code == "parameter" else int(index[1]) if index else -1
    names = tuple(_NAME.findall(operands))
    groups = called[1] if called else "", position, channel[1] if channel else "", computation
    return _Operation(name, sizes, code, names, *groups)


def _size(bits: str, shape: str) -> int:
    """Return the bytes of an array; a `pred`, whose name contains no bits, has one byte per element."""
    return math.prod(int(size) for size in shape.split(",") if size) * int(bits or 8) // 8
