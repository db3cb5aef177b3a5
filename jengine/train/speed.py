"""Time and speed of a run as text."""

from collections.abc import Callable, Mapping

from jengine.logging.goodput import Goodput
from jengine.logging.tables import format_table
from jengine.train.compilation_cache import cache_counts


def format_speed(scalars: Mapping[str, float], goodput: Goodput) -> str:
    """Return a table with the time by phase, followed by lines with the goodput and the speed.

    Args:
      scalars: those of `measure_speed`, with the times of this session.
      goodput: the times of all sessions, which are shown if there are several.
    """
    seconds = {
        name.removeprefix("seconds/"): value
        for name, value in scalars.items()
        if name.startswith("seconds/")
    }
    total = sum(seconds.values())
    columns = ["part", "seconds", "share"]
    rows = [[phase, *_share(x, total)] for phase, x in seconds.items()]
    lost = ""
    # Only a resumed run has columns for all sessions; for others they would repeat the first ones.
    if goodput.sessions > 1:
        columns += [f"all {goodput.sessions} sessions", "share"]
        rows += [[phase, "", ""] for phase in goodput.seconds if phase not in seconds]
        rows = [[*row, *_share(goodput.seconds.get(row[0], 0.0), goodput.total)] for row in rows]
        rows.append(["lost steps", "", "", *_share(goodput.lost_seconds, goodput.total)])
        lost = f" over all sessions; {goodput.lost_iterations:,} iterations were lost and ran again"
    rows.append(
        [
            "all",
            *_share(total, total),
            *(_share(goodput.total, goodput.total) if goodput.sessions > 1 else []),
        ]
    )
    table = format_table(columns, rows, title="Time")
    lines = (
        [table, f"goodput: {goodput.share:.1%} of the time in steps{lost}"]
        if goodput.sessions
        else [table]
    )
    hits, misses = cache_counts()
    lines.append(f"compilation cache: {hits} programs found, {misses} compiled")
    formats: dict[str, Callable[[float], str]] = {
        "iterations_per_second": "{:,.1f} iterations/s".format,
        "examples_per_second": "{:,.0f} examples/s".format,
        "flops_per_second": _format_flops,
        "model_flops_utilisation": "{:.1%} of the devices' peak".format,
    }
    speeds = [
        format_(scalars[f"speed/{name}"])
        for name, format_ in formats.items()
        if f"speed/{name}" in scalars
    ]
    if speeds:
        lines.append(f"{', '.join(speeds)}, without compiling, validation and checkpoints")
    return "\n".join(lines)


def _share(seconds: float, total: float) -> list[str]:
    return [f"{seconds:.2f}", f"{seconds / total if total else 0.0:.1%}"]


def _format_flops(value: float) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:,.1f} {prefix}FLOP/s"
    return f"{value:,.0f} FLOP/s"
