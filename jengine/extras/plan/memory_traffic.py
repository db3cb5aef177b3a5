"""Bytes that the operations in a compiled program read and write, with all loop iterations."""

from jengine.extras.plan.hlo import Operation, Program

# what they call reads and writes memory, they do not
_CONTROL = ("while", "conditional", "call", "async-start")
_FREE = (
    *_CONTROL,
    "async-update",
    "async-done",
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
)
_SAME_ELEMENTS = ("bitcast", "copy", "convert", "reshape", "transpose")


def compute_loop_factor(program: Program) -> float:
    """Return a program's memory traffic, divided by the traffic if each loop had one iteration.

    XLA's `cost_analysis` counts a loop body once. It also includes what the text does not show,
    such as padding, so you should multiply its bytes by this factor instead of adding up the bytes
    of the text.
    """
    once = total = 0
    for operation in program.operations.values():
        if operation.code not in _FREE and _is_control(program, operation.computation):
            size = _count_bytes(program, operation)
            once += size
            total += size * program.count_executions(operation.computation)
    return total / once if once else 1.0


def _is_control(program: Program, computation: str) -> bool:
    """Return whether the operations in a computation run one by one, unlike those in a fusion or
    a reduction.
    """
    callers = program.callers[computation]
    return all(
        caller.code in _CONTROL and _is_control(program, caller.computation) for caller in callers
    )


def _count_bytes(program: Program, operation: Operation) -> int:
    read = sum(
        _count_read(program, operation, index, name)
        for index, name in enumerate(operation.operands)
        if not operation.code.endswith("-done")
    )
    written = 0 if operation.code.endswith("-start") else _count_written(program, operation)
    return read + written


def _count_read(program: Program, user: Operation, index: int, name: str) -> int:
    """Return the bytes that an operation reads from an operand: only a slice, if that is all
    that it uses.
    """
    operand = program.operations.get(name)
    size = sum(operand.result) if operand else 0
    if user.code == "fusion":
        return min(
            size, _count_read_inside(program, program.parameters.get((user.called[0], index), ""))
        )
    if index == 0 and user.code in ("dynamic-slice", "slice", "gather"):
        return sum(user.result)
    return 0 if index == 0 and user.code == "dynamic-update-slice" else size


def _count_read_inside(program: Program, name: str) -> int:
    """Return the bytes that a fusion reads from a value in it."""
    total = 0
    for user in program.users[name]:
        # Bitcasts and the like move nothing: what counts is who reads them in the end.
        if user.code in _SAME_ELEMENTS and program.users[user.name]:
            total += _count_read_inside(program, user.name)
        else:
            places = (index for index, operand in enumerate(user.operands) if operand == name)
            total += sum(_count_read(program, user, index, name) for index in places)
    return total


def _count_written(program: Program, operation: Operation) -> int:
    """Return the bytes that an operation writes: only the update, if it updates a slice in
    place.
    """
    root = program.roots.get(operation.called[0]) if operation.code == "fusion" else operation
    while root is not None and root.code in _SAME_ELEMENTS and root is not operation:
        root = program.operations.get(root.operands[0])
    if root is not None and root.code == "dynamic-update-slice":
        return sum(program.operations[root.operands[1]].result)
    return sum(operation.result)
