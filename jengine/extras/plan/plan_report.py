"""Costs of compiled programs, as text."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.cli.commands import format_bytes
from jengine.logging.tables import format_table

_UNKNOWN_LOOPS = "loops with an unknown number of iterations, which are counted as one"


def format_plan(plan: Mapping[str, Any]) -> str:
    """Return a plan, as returned by `compile_plan`, as tables."""
    mesh = plan["mesh"]
    examples = plan["examples_per_step"]
    title = f"{plan['devices']} devices, mesh {mesh}, {examples} examples per step"
    memory = plan.get("chip_memory")
    parts = [
        f"{plan['topology']}: {title}" if memory else title,
        _format_params(plan["parameters"]),
    ]
    for name, program in plan["programs"].items():
        parts += _format_program(name, program, plan["devices"], memory)
    if memory and plan["fits"]:
        parts.append(f"It fits: at most {_format_share(plan)} of a chip's memory.")
    elif memory:
        parts.append(f"It does not fit into {format_bytes(memory)} of memory per chip.")
    return "\n\n".join(parts)


def format_search(plans: Sequence[Mapping[str, Any]], by_size: bool = False) -> str:
    """Return the table for a search, best first, and the config lines for the best plan.

    `by_size`: of batch sizes.
    """
    rows = []
    for plan in plans:
        step = plan.get("step_seconds")
        rows.append(
            [
                ", ".join(f"{axis}={size}" for axis, size in plan["candidate"]["mesh"].items()),
                {None: "", True: "on", False: "off"}[plan["candidate"]["remat"]],
                str(plan["candidate"]["batch_size"]),
                _format_share(plan) if "programs" in plan else "",
                f"{step * 1e3:,.3f}" if step else "",
                f"{plan['examples_per_second']:,.0f}" if step else "",
                "yes"
                if plan["fits"]
                else textwrap.shorten(f"no: {plan['reason']}", 60, placeholder="…"),
            ]
        )
    columns = ["mesh", "remat", "batch_size", "memory", "ms per step", "examples/s", "fits"]
    order = "the batch size" if by_size else "the estimated examples per second"
    table = format_table(columns, rows, title=f"Plans, by {order}")
    if loops := sum(
        each.get("unknown_loops", 0)
        for plan in plans[:1]
        for each in plan.get("programs", {}).values()
    ):
        table += f"\n{_UNKNOWN_LOOPS}: {loops}"
    if not plans or not plans[0]["fits"]:
        return f"{table}\n\nNothing fits."
    return "\n".join(
        [f"{table}\n", "The first one, as lines of the config:", *plans[0]["config_lines"]]
    )


def _format_params(params: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of sharded parameters, with one row for all replicated ones."""
    sharded = [each for each in params if each["shard_shape"] != each["shape"]]
    rows = []
    for each in sharded:
        shapes = [str(tuple(each[name])) for name in ("shape", "spec", "shard_shape")]
        rows.append([each["path"], *shapes, format_bytes(each["bytes"])])
    size = sum(each["bytes"] for each in params) - sum(each["bytes"] for each in sharded)
    rows.append([f"{len(params) - len(sharded)} replicated", "", "", "", format_bytes(size)])
    columns = ["parameter", "shape", "spec", "shard shape", "bytes per device"]
    return format_table(columns, rows, title="Sharding of the parameters")


def _format_program(
    name: str, program: Mapping[str, Any], devices: int, chip_memory: int | None
) -> list[str]:
    # A program that does not compile is a result too: it is the one that does not fit.
    if "error" in program:
        return [f"Program: {name}\nIt does not fit: {program['error']}"]
    rows = [[kind, format_bytes(size)] for kind, size in program["memory"].items() if size]
    rows.append(["total", format_bytes(program["total_memory"])])
    if program["host_memory"]:
        rows.append(["in the memory of the host", format_bytes(program["host_memory"])])
    if chip_memory:
        rows.append(
            [
                "of the chip",
                f"{program['total_memory'] / chip_memory:.1%} of {format_bytes(chip_memory)}",
            ]
        )
    table = format_table(["memory per device", "bytes"], rows, title=f"Program: {name}")
    lines = [
        table,
        f"{program['flops']:.4g} FLOPs per device, {program['flops'] * devices:.4g} in total",
    ]
    accessed = program["bytes_accessed"]
    lines.append(
        f"memory traffic per device: {'unknown' if accessed is None else format_bytes(accessed)}"
    )
    if "seconds" in program:
        estimate = f"at least {program['bound_seconds'] * 1e3:.4g} ms by {program['bound_by']}"
        if (seconds := program["compiler_seconds"]) is not None:
            estimate = f"{seconds * 1e3:.4g} ms by the compiler, {estimate}"
        used = (
            "unknown" if program["utilisation"] is None else f"at most {program['utilisation']:.1%}"
        )
        lines.append(f"estimated time: {estimate}; utilisation {used}")
    if cycles := program["cycles"]:
        kernels = sum(program["kernels"].values())
        outside = f" outside of {kernels} kernels" if kernels else ""
        lines.append(f"cycles by the compiler: {cycles / 1e6:.4g} million{outside}")
    lines.append(f"compiled in {program['compile_seconds']:.1f} s")
    if program["has_float64"]:
        lines.append(
            "warning: the program computes in float64, which accelerators emulate or do slowly"
        )
    if count := program["host_callbacks"]:
        lines.append(
            f"warning: the program calls the host at {count} places, and waits for it each time"
        )
    if count := program["unknown_loops"]:
        lines.append(f"warning: {_UNKNOWN_LOOPS}: {count}")
    collectives = _format_collectives(name, program["collectives"])
    if "every" in program:
        sent = sum(row["traffic"] for row in program["collectives"])
        collectives += (
            f"\ncalled every {program['every']} iterations: {format_bytes(sent)} sent per device, "
            f"{format_bytes(round(sent / program['every']))} per iteration"
        )
    return ["\n".join(lines), collectives]


def _format_collectives(name: str, collectives: Sequence[Mapping[str, Any]]) -> str:
    if not collectives:
        return f"No collectives ({name})."
    rows = [
        [
            row["kind"],
            str(row["count"]),
            str(row["arrays"]),
            format_bytes(row["size"]),
            format_bytes(row["largest"]),
            format_bytes(row["traffic"]),
        ]
        for row in collectives
    ]
    columns = [
        "collective",
        "count",
        "arrays",
        "bytes of arrays",
        "largest",
        "bytes sent per device",
    ]
    return format_table(
        columns, rows, title=f"Collectives ({name}; one in a loop counts in each iteration)"
    )


def _format_share(plan: Mapping[str, Any]) -> str:
    totals = [
        program["total_memory"]
        for program in plan["programs"].values()
        if "total_memory" in program
    ]
    return f"{max(totals) / plan['chip_memory']:.1%}" if totals else ""
