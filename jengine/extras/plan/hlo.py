"""HLO text of a compiled program: the operations, and how often each of them runs."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# `f32[4,2]`: the type, the bits of an element in it, and the shape.
_ARRAY = re.compile(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
# The header of a computation, `%fused (p: f32[4]) -> f32[4] {`.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) .*\{$")
# `ROOT %name = type opcode(operands), attributes`; the type may be a tuple with spaces and
# brackets.
_OPERATION = re.compile(r"^\s*(ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*?)\)(.*)$")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(
    r"(?:calls|condition|body|to_apply|branch_computations|true_computation|false_computation)="
    r"\{?(%[\w.-]+(?:, ?%[\w.-]+)*)"
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_DIRECTION = re.compile(r"direction=(\w+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNELS = ("tpu_custom_call", "__cudnn")  # Pallas and cuDNN
_UNKNOWN_CYCLES = 10**12  # and above: XLA has no estimate, which is so for kernels
_NUMBERS = {
    "get-tuple-element": re.compile(r"index=(\d+)"),
    "while": re.compile(r'"known_trip_count":\{"n":"(\d+)"'),
}
# Between TPU slices, a collective is a host transfer of XLA's runtime, of which the text has both
# ends.
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_INTEGER = re.compile(r"(-?\d+)")
_TRANSFERS = {
    name.upper().replace("-", "_"): name
    for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
}
# Operations through which a loop counter is followed to its source.
_SAME_VALUE = ("copy", "bitcast", "convert")
_CONTINUED = ("async-update", "async-done")  # name again what their async-start calls


class Operation(NamedTuple):
    """One operation."""

    name: str
    result: tuple[int, ...]  # bytes of each array
    # the opcode: 'dot', 'all-reduce-start'; for a custom call its target: 'tpu_custom_call'
    code: str
    operands: tuple[str, ...]
    # computations: that of a fusion, the condition and the body of a loop, branches
    called: tuple[str, ...]
    # of a parameter or a tuple element; the value of an integer constant; the iterations of a loop
    number: int | None
    channel: str  # identifies a collective, or ''
    direction: str  # of a comparison, such as 'LT', or ''
    computation: str  # that contains the operation, or ''
    cycles: int  # estimate of XLA's compiler for TPUs; 0 for none


class Program:
    """Operations in a compiled program, who uses them, and how often each runs.

    Args:
      text: `jax.jit(f).lower(...).compile().as_text()`.

    Attributes:
      operations: by name, in order.
      users: the operations that use a result, by operation name.
      callers: the operations that call a computation, by computation name.
      parameters: the parameter name, by computation and index.
      roots: the operation that is the result, by computation name.
      unknown_loops: number of loops whose iterations are unknown; the bodies count once.
      repeats: whether a loop has more than one iteration, or an unknown number.
    """

    def __init__(self, text: str) -> None:
        self.operations: dict[str, Operation] = {}
        self.users: defaultdict[str, list[Operation]] = defaultdict(list)
        self.callers: defaultdict[str, list[Operation]] = defaultdict(list)
        self.parameters: dict[tuple[str, int | None], str] = {}
        self.roots: dict[str, Operation] = {}
        computation = ""
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                computation = header[1]
            elif parts := _OPERATION.match(line):
                root, *fields = parts.groups()
                self._add(_parse_operation(computation, *fields), bool(root))
        loops = [operation for operation in self.operations.values() if operation.code == "while"]
        self._iterations: Mapping[str, int | None] = {
            loop.name: self._count_iterations(loop) for loop in loops
        }
        self.unknown_loops = sum(count is None for count in self._iterations.values())
        self.repeats = any(count != 1 for count in self._iterations.values())
        self._executions: dict[str, int] = {}  # by computation; filled on demand

    def _add(self, operation: Operation, is_root: bool) -> None:
        self.operations[operation.name] = operation
        # A set: `multiply(x, x)` is one user of `x`, and would otherwise be counted twice.
        for operand in set(operation.operands):
            self.users[operand].append(operation)
        for computation in () if operation.code in _CONTINUED else set(operation.called):
            self.callers[computation].append(operation)
        if operation.code == "parameter":
            self.parameters[operation.computation, operation.number] = operation.name
        if is_root:
            self.roots[operation.computation] = operation

    def count_executions(self, computation: str) -> int:
        """Return how often a computation runs: the product of the iterations of all loops around
        it.

        A conditional branch counts as if it always ran, and a loop with unknown length as if it ran
        once.
        """
        if computation not in self._executions:
            callers = self.callers[computation]
            counts = [
                self.count_executions(caller.computation)
                * (1 if (count := self._iterations.get(caller.name)) is None else count)
                for caller in callers
            ]
            # A computation without a caller is the entry.
            self._executions[computation] = sum(counts) if callers else 1
        return self._executions[computation]

    def estimate_cycles(self) -> int | None:
        """Return the cycles on a TPU by XLA's estimate, without kernels (Pallas).

        None where it has no estimate.
        """
        cycles = (
            each.cycles * self.count_executions(each.computation)
            for each in self.operations.values()
        )
        return sum(cycles) or None

    def count_kernels(self) -> dict[str, int]:
        """Return how often each kind of kernel runs: 'tpu_custom_call' are those of Pallas,
        '__cudnn$...' cuDNN's.
        """
        counts: Counter[str] = Counter()
        for each in self.operations.values():
            if each.code.startswith(_KERNELS):
                counts[each.code] += self.count_executions(each.computation)
        return dict(counts)

    def _count_iterations(self, loop: Operation) -> int | None:
        """Return the number of iterations; None if it is not constant.

        XLA's compilers for CPUs and GPUs write it into the text. Those for TPUs do not: there the
        loop counter is followed from the first value, by the step, to the limit in the condition.
        """
        if loop.number is not None:
            return loop.number  # from `known_trip_count`
        # HLO's order of attributes in the text of a loop is always condition, then body.
        condition, body = loop.called
        test = self.roots.get(condition)
        state = self.operations.get(loop.operands[0])
        result = self.roots.get(body)
        if (
            not test
            or not state
            or not result
            or (test.code, state.code, result.code) != ("compare", "tuple", "tuple")
        ):
            return None
        counter, limit = (self._find_source(name) for name in test.operands)
        if counter is None or counter.code != "get-tuple-element" or counter.number is None:
            return None
        # The loop state is a tuple: the counter has one position in the first state and in the
        # body's result.
        start, update = (
            self._find_source(each.operands[counter.number]) for each in (state, result)
        )
        if update is None or update.code != "add":
            return None
        previous, step = (self._find_source(name) for name in update.operands)
        if previous is None or (previous.code, previous.number) != (counter.code, counter.number):
            return None
        numbers = [
            each.number
            for each in (start, limit, step)
            if each is not None and each.code == "constant"
        ]
        values = [number for number in numbers if number is not None]
        if len(values) != 3 or test.direction != ("LT" if values[2] > 0 else "GT"):
            return None
        # Python's range has the same semantics: from the start, by the step, below or above the
        # limit.
        return len(range(*values)) if values[2] else None

    def _find_source(self, name: str) -> Operation | None:
        """Return the operation that the named one copies."""
        operation = self.operations.get(name)
        while operation is not None and operation.code in _SAME_VALUE:
            operation = self.operations.get(operation.operands[0])
        return operation

    def operand_sizes(self, operation: Operation) -> tuple[int, ...]:
        """Return bytes by operand; empty if the text does not contain them."""
        return tuple(
            size
            for name in operation.operands
            if name in self.operations
            for size in self.operations[name].result
        )

    def initial_values(self, element: Operation) -> Sequence[str]:
        """Return the tuple that has an element.

        For a loop state, the element's value before the loop.
        """
        source = self.operations.get(element.operands[0])
        if source is None or source.code != "parameter" or element.number is None:
            return element.operands
        # A value that a loop carries is its parameter inside: the caller's tuple has what it was
        # before the loop.
        loops = [caller for caller in self.callers[source.computation] if caller.code == "while"]
        states = [
            self.operations[name]
            for loop in loops
            for name in loop.operands
            if name in self.operations
        ]
        return [state.operands[element.number] for state in states if state.code == "tuple"]


def _parse_operation(
    computation: str, name: str, result: str, code: str, operands: str, rest: str
) -> Operation:
    """Return an operation from the groups in its line."""
    sizes = tuple(  # a `pred`, whose name contains no bits, has one byte per element
        math.prod(int(size) for size in shape.split(",") if size) * int(bits or 8) // 8
        for _, bits, shape in _ARRAY.findall(result)
    )
    channel, direction = (
        found[1] if (found := each.search(rest)) else "" for each in (_CHANNEL, _DIRECTION)
    )
    if code in ("send", "recv") and (transfer := _BETWEEN_SLICES.search(rest)):
        kind = _TRANSFERS.get(transfer[1], "collective-permute")
        # the end that has all of the array
        if code == ("recv" if kind == "all-gather" else "send"):
            code = kind  # without its identifier and token
            sizes = sizes[:1]
    called = tuple(name for names in _CALLED.findall(rest) for name in _NAME.findall(names))
    number = _NUMBERS[code].search(rest) if code in _NUMBERS else _INTEGER.fullmatch(operands)
    names = tuple(_NAME.findall(operands))
    value = int(number[1]) if number else None
    if code == "custom-call" and (target := _TARGET.search(rest)):
        code = target[1]
    cycles = int(found[1]) if (found := _CYCLES.search(rest)) else 0
    cycles = 0 if cycles >= _UNKNOWN_CYCLES else cycles
    return Operation(
        name, sizes, code, names, called, value, channel, direction, computation, cycles
    )
