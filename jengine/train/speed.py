"""Time and speed of a run as text."""

from collections.abc import Callable, Mapping

from jengine.logging import format_table
from jengine.train.compilation_cache import cache_counts


def format_speed(scalars: Mapping[str, float]) -> str:
    """Return a table with the time by phase, followed by a line with the speed, from `measure_speed`."""
    seconds = {name.removeprefix("seconds/"): value for name, value in scalars.items() if name.startswith("seconds/")}
    total = sum(seconds.values())
    rows = [[phase, f"{value:.2f}", f"{value / total:.1%}"] for phase, value in seconds.items()]
    table = format_table(["part", "seconds", "share"], [*rows, ["all", f"{total:.2f}", "100.0%"]], title="Time")
    hits, misses = cache_counts()
    lines = [table, f"compilation cache: {hits} programs found, {misses} compiled"]
    formats: dict[str, Callable[[float], str]] = {
        "iterations_per_second": "{:,.1f} iterations/s".format,
        "examples_per_second": "{:,.0f} examples/s".format,
        "flops_per_second": _format_flops,
        "model_flops_utilisation": "{:.1%} of the devices' peak".format,
    }
    speeds = [format_(scalars[f"speed/{name}"]) for name, format_ in formats.items() if f"speed/{name}" in scalars]
    if speeds:
        lines.append(f"{', '.join(speeds)}, without compiling, validation and checkpoints")
    return "\n".join(lines)


def _format_flops(value: float) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:,.1f} {prefix}FLOP/s"
    return f"{value:,.0f} FLOP/s"
