"""Collectives in a compiled program, found in the HLO text without running it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jengine.extras.plan.hlo import Operation, Program

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_SCATTERING = "all-reduce-scatter"  # the computation of a fused reduce-scatter on TPUs
# the result of their start contains the operands too
_WITH_OPERANDS = ("all-gather", "collective-permute")
_SAME_ELEMENTS = ("bitcast", "copy", "convert", "reshape", "transpose", "all-reduce-done")
_TRANSFERS = {"all-reduce": 2}  # a reduce-scatter and an all-gather


class Collective(NamedTuple):
    """One collective operation."""

    kind: str  # one of KINDS
    arrays: int  # number of arrays: XLA combines independent collectives
    size: int  # bytes of the result on one device; of the operands for a reduce-scatter
    executions: int = 1  # the product of the iterations of the loops around it

    @property
    def traffic(self) -> int:
        """Bytes that a device sends, for many devices: an all-reduce sends twice its size,
        others once.
        """
        return _TRANSFERS.get(self.kind, 1) * self.size * self.executions


def find_collectives(program: str | Program) -> list[Collective]:
    """Return the collectives in a compiled program, in order.

    A collective in a loop is listed once, with the number of executions, see
    `Program.count_executions`. An all-reduce counts as a reduce-scatter if every device uses only
    one slice: XLA writes sharded gradients in this form, and backends other than CPU may fuse the
    two. TPUs fuse the parts of an asynchronous collective with computations, each of which contains
    all of it; it is listed once.

    Args:
      program: `jax.jit(f).lower(...).compile().as_text()`, or the parsed text.

    >>> find_collectives(
    ...     "ENTRY %main (x: f32[4]) -> f32[4] {\\n  %sum = f32[4] all-reduce(%x), channel_id=1\\n}"
    ... )
    [Collective(kind='all-reduce', arrays=1, size=16, executions=1)]
    """
    program = Program(program) if isinstance(program, str) else program
    result = []
    # channel and kind -> the first fusion with such a collective
    owners: dict[tuple[str, str], str] = {}
    for operation in program.operations.values():
        kind = operation.code.removesuffix("-start")
        if kind not in KINDS:
            continue
        # Outside of fusions a channel identifies nothing: each `psum` of a `shard_map` has the
        # channel 1.
        is_fused = any(caller.code == "fusion" for caller in program.callers[operation.computation])
        if is_fused and operation.channel:
            owner = owners.setdefault((operation.channel, kind), operation.computation)
            if owner != operation.computation:
                continue
        sizes = operation.result
        if kind != operation.code and kind in _WITH_OPERANDS:
            # An asynchronous start returns (operands, results); behind those of a permute there may
            # be context words.
            sizes = sizes[len(sizes) // 2 :] if kind == "all-gather" else sizes[1:2]
        if kind == "reduce-scatter":
            sizes = program.operand_sizes(operation) or sizes  # the result is only a part
        scattered = (
            _find_scattered(program, operation) if kind == "all-reduce" else [False] * len(sizes)
        )
        executions = program.count_executions(operation.computation)
        # XLA combines all-reduces: some of the arrays may be used whole and others in slices.
        for effective_kind, flag in (("reduce-scatter", True), (kind, False)):
            selected = [
                size
                for size, is_scattered in zip(sizes, scattered, strict=True)
                if is_scattered is flag
            ]
            if selected:
                result.append(Collective(effective_kind, len(selected), sum(selected), executions))
    return result


def traffic(collectives: Iterable[Collective]) -> int:
    """Return the bytes that a device sends in all collectives."""
    return sum(collective.traffic for collective in collectives)


def _find_scattered(program: Program, operation: Operation) -> list[bool]:
    """Return, for each result array, whether every device uses only one slice."""
    count = len(operation.result)
    if operation.computation.startswith(_SCATTERING):
        return [True] * count
    elements: list[list[str]] = [[] for _ in range(count)]
    for user in program.users[operation.name] if count > 1 else ():
        if user.code in _SAME_ELEMENTS:  # the `done` of an asynchronous operation
            return _find_scattered(program, user)
        if user.code != "get-tuple-element" or user.number is None:
            return [False] * count
        elements[user.number].append(user.name)
    if count == 1:
        elements = [[operation.name]]
    return [
        bool(names) and all(_is_only_sliced(program, name) for name in names) for names in elements
    ]


def _is_only_sliced(program: Program, name: str) -> bool:
    def is_slice(user: Operation) -> bool:
        # A sum of which each device keeps its own slice is a reduce-scatter, which some backends
        # write like this.
        if user.code == "dynamic-slice":
            return user.operands[0] == name and _depends_on_device(program, user.operands[1:])
        if user.code == "fusion":
            (called,) = user.called
            inputs = [
                program.parameters[called, i]
                for i, operand in enumerate(user.operands)
                if operand == name
            ]
            return all(_is_only_sliced(program, each) for each in inputs)
        return user.code in _SAME_ELEMENTS and _is_only_sliced(program, user.name)

    users = program.users[name]
    return bool(users) and all(map(is_slice, users))


def _depends_on_device(program: Program, names: Sequence[str]) -> bool:
    """Return whether the values depend on the device index."""
    seen: set[str] = set()
    pending = list(names)  # a loop, since chains of operations are deeper than Python's stack
    while pending:
        name = pending.pop()
        operation = program.operations.get(name)
        if operation is None or name in seen:
            continue
        seen.add(name)
        if operation.code in ("partition-id", "replica-id"):
            return True
        if operation.code == "parameter" and operation.number is not None:
            callers = program.callers[operation.computation]
            pending += [
                caller.operands[operation.number] for caller in callers if caller.code == "fusion"
            ]
        pending += (
            program.initial_values(operation)
            if operation.code == "get-tuple-element"
            else operation.operands
        )
    return False
