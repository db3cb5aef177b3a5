"""Pictures of curves, for papers and for places without a browser."""

import contextlib
import io
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jengine.config.errors import ConfigError, require_extra
from jengine.config.storage import is_url, storage_path, write_bytes
from jengine.extras.report.run_files import ReportedRun
from jengine.extras.report.run_metrics import Points
from jengine.extras.report.run_table import RunTable, shorten_paths
from jengine.extras.report.table_format import count

_SUFFIXES = (".pdf", ".svg", ".png")
_FEW = 10  # lines: as many as the colors of a palette, and as a legend within the axes has room for
_FEW_POINTS = 30  # of a curve, which are marked
_COLUMNS = 3
_PANEL = (4.2, 2.8)  # inches
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,  # fonts that journals accept, and text that can be edited
    "svg.fonttype": "none",
}


def average(curves: Sequence[Points]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions, mean and sample standard deviation of curves, each float64[n].

    The positions are those of the longest curve; a mean is over the curves that reach it.

    >>> average([([1, 2], [1.0, 3.0]), ([1], [2.0])])
    (array([1., 2.]), array([1.5, 3. ]), array([0.70710678, 0.        ]))
    """
    x = np.asarray(max((positions for positions, _ in curves), key=len), float)
    rows = []
    for positions, values in curves:
        known = np.isfinite(np.asarray(values, float))
        xs = np.asarray(positions, float)[known]
        ys = np.asarray(values, float)[known]
        rows.append(
            np.interp(x, xs, ys, math.nan, math.nan) if len(xs) else np.full(len(x), np.nan)
        )
    found = np.ma.masked_invalid(np.stack(rows))
    spread = found.std(axis=0, ddof=1).filled(0.0) if len(rows) > 1 else np.zeros(len(x))
    return x, found.mean(axis=0).filled(math.nan), spread


def plot_metric(
    path: str, runs: Mapping[str, ReportedRun], table: RunTable, metric: str | None = None
) -> str:
    """Draw a metric over the iterations, a line for each setting, with a band of one standard
    deviation over its seeds.

    Args:
      path: a .pdf, .svg or .png file, or its URL.
      runs: the runs, by name.
      table: their table.
      metric: a validation metric; None for the main one.

    Returns:
      What the picture shows, in one line.

    Raises:
      ConfigError: a file of another kind, or a metric that no run has.
      MissingPackageError: matplotlib is not installed.
    """
    groups = table.groups(metric)
    name = table.find_metric(metric)
    short = shorten_paths(table.hyperparams)
    key = ("train", name.removeprefix("train/")) if name.startswith("train/") else ("val", name)
    with _figure(path, "--plot", _PANEL) as figure:
        figure.set_layout_engine("none")  # the axes keep their size, the legend makes it larger
        axes = figure.subplots()
        for group, color in zip(groups, _colors(len(groups)), strict=True):
            curves = [runs[run.name].curves[0].get(key) for run in group.runs]
            label = _label(group.hyperparams, short, group.runs[0].name)
            _draw(axes, [curve for curve in curves if curve], label, color)
        axes.set_xlabel("iteration")
        axes.set_ylabel(name)
        outside = dict(loc="center left", bbox_to_anchor=(1, 0.5)) if len(groups) > 4 else {}
        axes.legend(**outside)
    seeds = max(len(group.runs) for group in groups)
    spread = ", mean ± deviation over seeds" if seeds > 1 else ""
    return f"{path} shows {name} of {count(len(groups), 'setting')}{spread}"


def draw_page(path: str, data: Mapping[str, Any]) -> None:
    """Draw the curves of a report, a panel for each scalar; validations are dashed, and more than
    ten runs are means over seeds.

    Args:
      path: a .png, .pdf or .svg file, or its URL.
      data: the result of `collect_data`.

    Raises:
      ConfigError: a file of another kind, or runs without curves.
      MissingPackageError: matplotlib is not installed.
    """
    panels = [panel["name"] for panel in data["panels"] if panel["group"] != "Time and memory"]
    if not panels:
        raise ConfigError("`--png` must have a run with a log line, got no curves yet")
    groups = {run["name"]: [run["name"]] for run in data["runs"]}
    if len(groups) > _FEW:
        groups = {
            _label(group["hyperparams"], data["table"]["hyperparams"], group["runs"][0]): group[
                "runs"
            ]
            for group in data["table"]["groups"]
        }
    series: dict[tuple[str, str, str], Points] = {}
    for run in data["runs"]:
        for each in run["series"]:
            values = [math.nan if value is None else value for value in each["y"]]
            series[run["name"], each["mode"], each["name"]] = (each["x"], values)
    rows = math.ceil(len(panels) / _COLUMNS)
    columns = min(len(panels), _COLUMNS)
    with _figure(path, "--png", (_PANEL[0] * columns, _PANEL[1] * rows + 0.3)) as figure:
        all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(all_axes, panels, strict=False):
            for (label, members), color in zip(groups.items(), _colors(len(groups)), strict=True):
                for mode, style in (("train", "-"), ("val", "--")):
                    curves = [series.get((name, mode, panel)) for name in members]
                    _draw(axes, [curve for curve in curves if curve], label, color, style)
            axes.set_title(panel)
        for axes in all_axes[len(panels) :]:
            axes.set_visible(False)
        handles = {
            line.get_label(): line for axes in all_axes for line in axes.lines if len(groups) > 1
        }
        if 0 < len(handles) <= 2 * _FEW:
            figure.legend(handles.values(), handles, loc="outside upper left", ncols=columns)


@contextlib.contextmanager
def _figure(path: str, argument: str, size: tuple[float, float]) -> Iterator[Any]:
    """Yield a figure of a size in inches, and write it to a file."""
    suffix = pathlib.PurePath(path).suffix
    if suffix not in _SUFFIXES:
        raise ConfigError(f"`{argument}` must end in .pdf, .svg or .png, got {path!r}")
    with require_extra("plot", f"{argument} requires matplotlib"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")  # without pyplot, which would keep it
        yield figure
        out = io.BytesIO()
        figure.savefig(out, format=suffix[1:], dpi=150, bbox_inches="tight")
    file = storage_path("path", path)
    if not is_url(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, out.getvalue())


def _colors(number: int) -> list[Any]:
    from matplotlib import colormaps

    if number <= _FEW:
        return [colormaps["tab10"](i) for i in range(number)]
    return [colormaps["viridis"](i / (number - 1)) for i in range(number)]


def _draw(axes: Any, curves: Sequence[Points], label: str, color: Any, style: str = "-") -> None:
    if not curves:
        return
    x, mean, spread = average(curves)
    marker = "o" if len(x) <= _FEW_POINTS else ""
    axes.plot(x, mean, style, color=color, label=label, marker=marker, markersize=3)
    if spread.any():
        axes.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)


def _label(hyperparams: Mapping[str, Any], names: Mapping[str, str], run: str) -> str:
    values = [f"{names[path]}={value}" for path, value in hyperparams.items() if path in names]
    return ", ".join(values) or run
