"""Report data for runs, in JSON's types."""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jengine.extras.report.foreign_files import is_number
from jengine.extras.report.goodput import measure_goodput
from jengine.extras.report.remote import origin
from jengine.extras.report.run_files import ReportedRun
from jengine.extras.report.run_metrics import TIMES, Points, compare_configs, find_best
from jengine.extras.report.run_table import RunRow, RunTable, SeedGroup, build_table, shorten_paths

MAX_POINTS = 2000  # of a curve: about as many as a screen has pixels
_MAX_ALL_POINTS = 120_000  # of all curves: two megabytes
_MIN_POINTS = 100  # of a curve of many runs
MAX_IMAGE_NAMES = 24
_IMAGES = 8  # steps of an image
_FEW = 8  # runs
_MAX_NAMES = 20
_PNG = b"\x89PNG"
_MODES = ("train", "val", "test")
Curves = dict[tuple[str, str], Points]  # by mode and name
# ends of the names of hyperparameters that schedules change
_RATES = ("lr", "momentum", "weight_decay")


def build_page_data(runs: Mapping[str, ReportedRun], images: int | None = None) -> dict[str, Any]:
    """Return the report data: runs with curves and facts, their table, panels in order, and config
    values by path.

    `images` is the number of steps to show of each image; by default 8, and 1 of more than 8 runs.
    """
    curves = {name: _select_curves(run) for name, run in runs.items()}
    # A budget over all runs: the page must stay small enough for a browser.
    limit = min(MAX_POINTS, _MAX_ALL_POINTS // max(1, sum(map(len, curves.values()))))
    images = images or (_IMAGES if len(runs) <= _FEW else 1)
    table, compared = _describe_table(build_table(runs))
    described = [
        {
            **_describe_run(name, run, curves[name], max(limit, _MIN_POINTS), images),
            **compared[name],
        }
        for name, run in runs.items()
    ]
    config = compare_configs([run.config for run in runs.values()])
    return {"runs": described, "table": table, "panels": _list_panels(described), "config": config}


def thin(x: Sequence[float], y: Sequence[float], limit: int) -> Points:
    """Return at most `limit` points, the lowest and the highest in each of `limit / 2` equal parts.

    NaN and infinities are dropped unless a part has no other values.

    >>> thin([0, 1, 2, 3], [5.0, 1.0, 2.0, 3.0], limit=2)
    ([0, 1], [5.0, 1.0])
    """
    if len(y) <= limit:
        return list(x), list(y)
    values = np.asarray(y)
    kept: set[int] = set()
    for part in np.array_split(np.arange(len(y)), limit // 2):
        finite = part[np.isfinite(values[part])]
        # The extremes of each part stay: spikes are what one looks for, and a mean would hide them.
        candidates = finite if finite.size else part[:1]
        kept.update(
            (
                int(candidates[values[candidates].argmin()]),
                int(candidates[values[candidates].argmax()]),
            )
        )
    order = sorted(kept)
    return [x[i] for i in order], [y[i] for i in order]


def _select_curves(run: ReportedRun) -> Curves:
    curves = run.curves[0]
    base = ("train", "base_lr")
    # they differ only in runs with several learning rates
    is_double = curves.get(base) == curves.get(("train", "lr"))
    return {key: points for key, points in curves.items() if key != base or not is_double}


def _describe_table(table: RunTable) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return hyperparameters, metrics and groups over seeds, and for each run its values and its
    group.
    """

    def describe(row: RunRow | SeedGroup) -> dict[str, Any]:
        # A config may contain any value that a file can
        hyperparams = {
            path: x if isinstance(x, str) or is_number(x) else repr(x)
            for path, x in row.hyperparams.items()
        }
        return {"hyperparams": hyperparams, "values": {"best": row.best, "final": row.final}}

    groups = table.groups()
    runs = {
        run.name: {**describe(run), "group": i}
        for i, group in enumerate(groups)
        for run in group.runs
    }
    return {
        "hyperparams": shorten_paths(table.hyperparams),
        "metrics": {name: table.rules.get(name, "") for name in table.metrics},
        "main": next((name for name in table.metrics if name in table.rules), ""),
        "groups": [
            {**describe(group), "runs": [run.name for run in group.runs]} for group in groups
        ],
    }, runs


def _describe_run(
    name: str, run: ReportedRun, curves: Curves, max_points: int, num_images: int
) -> dict[str, Any]:
    images, omitted = _embed_images(run, num_images)
    notes = list(run.notes)
    if others := run.curves[1]:
        names = f"{', '.join(others[:_MAX_NAMES])}{', ...' * (len(others) > _MAX_NAMES)}"
        notes.append(f"not drawn, because they are not numbers: {names}")
    if omitted:
        notes.append(
            f"{omitted} names of images are not shown; a report shows {MAX_IMAGE_NAMES} of each run"
        )
    sessions = run.record["sessions"]
    first, last = (sessions[0], sessions[-1]) if sessions else ({}, {})
    goodput = measure_goodput(sessions)
    lost = {"lost steps": goodput.lost_seconds} if goodput.lost_iterations else {}
    return {
        "name": name,
        "path": origin(run.log_dir),
        "status": run.status,
        "notes": notes,
        "started": first.get("started", ""),
        "updated": last.get("updated", ""),
        "sessions": len(sessions),
        "iter": run.iter,
        **{
            key: run.record.get(key)
            for key in ("max_iters", "max_epochs", "epoch_length", "seed", "model", "groups")
        },
        "versions": last.get("versions", {}),
        "devices": last.get("devices", ""),
        "seconds": {**goodput.seconds, **lost},
        "speed": _read_speed(run.rows),
        "series": [
            _describe_curve(*key, *points, max_points)
            for key, points in curves.items()
            if key[0] != "test"
        ]
        + [
            _describe_curve("train", f"share/{cause}", *points, max_points)
            for cause, points in _read_shares(run.stalls).items()
        ],
        "slowest": [
            {**dict.fromkeys(("seconds", "iteration"), 0), "cause": "", "place": "", **slow}
            for slow in run.stalls.get("slowest", [])
        ],
        "best": find_best(curves, run.config),
        "tests": run.tests,
        "images": images,
    }


def _read_shares(stalls: Mapping[str, Any]) -> dict[str, Points]:
    """Return the percent of the time by cause."""
    intervals = stalls.get("intervals", [])
    shares: dict[str, Points] = {}
    for cause in sorted({cause for each in intervals for cause in each.get("seconds", ())}):
        x, y = shares.setdefault(cause, ([], []))
        for each in intervals:
            total = sum(each.get("seconds", {}).values())
            if total > 0:
                x.append(int(each.get("iteration", 0)))
                y.append(100 * each["seconds"].get(cause, 0.0) / total)
    return shares


def _describe_curve(
    mode: str, name: str, x: Sequence[float], y: Sequence[float], limit: int
) -> dict[str, Any]:
    """Return the points (None if not finite), the number in the file, and where the curve is not
    finite.
    """
    kept_x, kept_y = thin(x, y, limit)
    bad = [position for position, value in zip(x, y, strict=True) if not math.isfinite(value)]
    return {
        "name": name,
        "mode": mode,
        "x": kept_x,
        # Seven digits, those of float32; more would only make the page larger.
        "y": [float(f"{value:.7g}") if math.isfinite(value) else None for value in kept_y],
        "total": len(y),
        "not_finite": {"count": len(bad), "first": bad[0]} if bad else None,
    }


def _list_panels(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return all curve names and groups: losses first, then metrics, own scalars, rates and
    times.
    """
    validated = {
        series["name"] for run in runs for series in run["series"] if series["mode"] == "val"
    }
    names = dict.fromkeys(series["name"] for run in runs for series in run["series"])
    panels = [{"name": name, "group": _find_group(name, validated)} for name in names]
    last = ["Training", "Learning rates", "Time and memory"]
    first = ["Losses", "Metrics"]
    own = sorted({panel["group"] for panel in panels} - {*first, *last})
    # Losses and metrics first; what the machine did comes last.
    order = {group: position for position, group in enumerate([*first, *own, *last])}
    return sorted(panels, key=lambda panel: order[panel["group"]])


def _find_group(name: str, validated: set[str]) -> str:
    if "loss" in name.lower():
        return "Losses"
    if name in validated:
        return "Metrics"
    if name in (*TIMES, "memory"):
        return "Time and memory"
    if name.endswith(_RATES) or name.split("/")[0] in _RATES:
        return "Learning rates"
    return name.split("/")[0] if "/" in name else "Training"


def _read_speed(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the speed in the last summary; {} before the end of the run."""
    speeds = (
        {name: x for name, x in row.items() if name.startswith("speed/")} for row in reversed(rows)
    )
    last = next(filter(None, speeds), {})
    return {name.removeprefix("speed/"): x for name, x in last.items() if is_number(x)}


def _embed_images(run: ReportedRun, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return the images as data URLs, and how many names are left out."""
    shown: list[dict[str, Any]] = []
    for name, found in list(run.images.items())[:MAX_IMAGE_NAMES]:
        shown.append({"name": name, "total": len(found), "items": []})
        for i in sorted({round(i) for i in np.linspace(0, len(found) - 1, min(limit, len(found)))}):
            step, path = found[i]
            content = run.files.read(path)
            # By its first bytes: the page embeds it, and a file with this name may be anything.
            if content is not None and content.startswith(_PNG):
                url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
                shown[-1]["items"].append({"step": step, "url": url})
            elif content is not None:
                run.files.note(path, "it must be a PNG file")
    return shown, max(0, len(run.images) - MAX_IMAGE_NAMES)
