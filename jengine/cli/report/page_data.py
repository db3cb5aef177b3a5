"""Report data for runs, in JSON's types."""

import base64
import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jengine.checkpoint import infer_rule, is_better
from jengine.cli.report.foreign_files import get_dict, is_number
from jengine.cli.report.run_files import ReportedRun

MAX_POINTS = 2000  # of a curve: about as many as a screen has pixels
MAX_IMAGE_NAMES = 24
_PROGRESS = ("step", "iter", "epoch", "mode")
_SUMMARY = ("seconds/", "speed/")  # written once, at the end of a run
_TIMES = ("time", "data_time")
_MAX_NAMES = 20
_PNG = b"\x89PNG"
_MODES = ("train", "val", "test")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as JSON lines write them
_RATES = ("lr", "momentum", "weight_decay")  # ends of the names of hyperparameters that schedules change

Points = tuple[list[float], list[float]]


def build_page_data(runs: Mapping[str, ReportedRun], images: int) -> dict[str, Any]:
    """Return the report data: runs with curves and facts, panels in order, and config values by path."""
    described = [_describe_run(name, run, images) for name, run in runs.items()]
    config = compare_configs([run.config for run in runs.values()])
    return {"runs": described, "panels": _list_panels(described), "config": config}


def read_curves(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[tuple[str, str], Points], list[str]]:
    """Return curves over the training iterations by `(mode, name)`, and the names of values that are not numbers.

    >>> read_curves([{"step": 1, "iter": 1, "mode": "train", "loss": 0.5, "note": "text"}])
    ({('train', 'loss'): ([1], [0.5])}, ['note'])

    Args:
      rows: lines in the scalar file. `mode` is the loop; lines without a mode belong to training, if they have an
        `iter`, or are a user's own scalars; else, with a `data_time`, to a validation after the training line before.
    """
    curves: dict[tuple[str, str], Points] = {}
    others: dict[str, None] = {}
    trained = 0
    for row in rows:
        # earlier versions wrote no mode
        is_old_validation = "mode" not in row and "iter" not in row and "data_time" in row
        mode = row.get("mode", "val" if is_old_validation else "train")
        step = trained if is_old_validation and trained else row.get("iter", row["step"])
        trained = step if mode == "train" else trained
        for name, value in row.items():
            if name in _PROGRESS or name.startswith(_SUMMARY) or (mode != "train" and name in _TIMES):
                continue
            if not isinstance(value, float) and not is_number(value) and value not in _NOT_FINITE:
                others[name] = None
                continue
            x, y = curves.setdefault((mode, name.removeprefix(f"{mode}/")), ([], []))
            x.append(step)
            y.append(float(value))
    return curves, list(others)


def thin(x: Sequence[float], y: Sequence[float], limit: int = MAX_POINTS) -> Points:
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
        candidates = finite if finite.size else part[:1]
        kept.update((int(candidates[values[candidates].argmin()]), int(candidates[values[candidates].argmax()])))
    order = sorted(kept)
    return [x[i] for i in order], [y[i] for i in order]


def compare_configs(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each dotted path in any of the configs: `path`, `values` ('' if absent) and `differs`.

    >>> compare_configs([{"lr": 0.1}, {"lr": 0.2}])
    [{'path': 'lr', 'values': ['0.1', '0.2'], 'differs': True}]
    """
    flat = [dict(_flatten(config, "")) for config in configs]
    rows = {path: [found.get(path, "") for found in flat] for path in sorted(set().union(*flat))}
    return [{"path": path, "values": values, "differs": len(set(values)) > 1} for path, values in rows.items()]


def _describe_run(name: str, run: ReportedRun, num_images: int) -> dict[str, Any]:
    curves, others = read_curves(run.rows)
    if curves.get(("train", "base_lr")) == curves.get(("train", "lr")):
        curves.pop(("train", "base_lr"), None)  # they differ only in runs with several learning rates
    images, omitted = _embed_images(run, num_images)
    notes = list(run.notes)
    if others:
        names = f"{', '.join(others[:_MAX_NAMES])}{', ...' * (len(others) > _MAX_NAMES)}"
        notes.append(f"not drawn, because they are not numbers: {names}")
    if omitted:
        notes.append(f"{omitted} names of images are not shown; a report shows {MAX_IMAGE_NAMES} of each run")
    sessions = run.record["sessions"]
    first, last = (sessions[0], sessions[-1]) if sessions else ({}, {})
    iterations = [session.get("iter", 0) for session in sessions] + [x[-1] for x, _ in curves.values()]
    seconds: collections.Counter[str] = collections.Counter()  # by phase
    for session in sessions:
        seconds.update(session.get("seconds", {}))
    return {
        "name": name,
        "path": str(run.log_dir),
        "status": run.status,
        "notes": notes,
        "started": first.get("started", ""),
        "updated": last.get("updated", ""),
        "sessions": len(sessions),
        "iter": int(max(iterations, default=0)),
        **{key: run.record.get(key) for key in ("max_iters", "max_epochs", "epoch_length", "seed", "model", "groups")},
        "versions": last.get("versions", {}),
        "devices": last.get("devices", ""),
        "seconds": dict(seconds.most_common()),
        "speed": _read_speed(run.rows),
        "series": [_describe_curve(*key, *points) for key, points in curves.items() if key[0] != "test"],
        "best": _find_best(curves, run.config),
        "test": {key: value for key, value in run.test.items() if is_number(value) and key not in _TIMES},
        "images": images,
    }


def _describe_curve(mode: str, name: str, x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Return the points (None if not finite), the number in the file, and where the curve is not finite."""
    kept_x, kept_y = thin(x, y)
    bad = [position for position, value in zip(x, y, strict=True) if not math.isfinite(value)]
    return {
        "name": name,
        "mode": mode,
        "x": kept_x,
        "y": [float(f"{value:.7g}") if math.isfinite(value) else None for value in kept_y],
        "total": len(y),
        "not_finite": {"count": len(bad), "first": bad[0]} if bad else None,
    }


def _find_best(curves: Mapping[tuple[str, str], Points], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the best and the last value of each validation metric; the best only if the rule is known."""
    found = []
    for (mode, name), (x, y) in curves.items():
        if mode != "val":
            continue
        rule = _find_rule(name, config)
        best: dict[str, float] | None = None
        for position, value in zip(x, y, strict=True) if rule else ():
            if math.isfinite(value) and is_better(rule, value, best["value"] if best else None):
                best = {"value": value, "iter": position}
        last = y[-1] if math.isfinite(y[-1]) else None
        found.append({"metric": name, "rule": rule, "best": best, "last": last, "count": len(y)})
    return found


def _find_rule(metric: str, config: Mapping[str, Any]) -> str:
    """Return 'greater', 'less' or '', as the config's checkpoint hook sets it, else from the metric's name."""
    hook = get_dict(config, "default_hooks", "checkpoint")
    values = hook.get("save_best"), hook.get("rule")
    metrics, rules = ((value,) if isinstance(value, str) else value for value in values)
    if isinstance(metrics, list | tuple) and isinstance(rules, list | tuple):
        for name, rule in zip(metrics, rules, strict=False):
            if name == metric and rule in ("greater", "less"):
                return rule
    try:
        return infer_rule(metric)
    except ValueError:
        return ""


def _list_panels(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return all curve names and groups: losses first, then metrics, own scalars, rates and times."""
    validated = {series["name"] for run in runs for series in run["series"] if series["mode"] == "val"}
    names = dict.fromkeys(series["name"] for run in runs for series in run["series"])
    panels = [{"name": name, "group": _find_group(name, validated)} for name in names]
    last = ["Training", "Learning rates", "Time and memory"]
    first = ["Losses", "Metrics"]
    own = sorted({panel["group"] for panel in panels} - {*first, *last})
    order = {group: position for position, group in enumerate([*first, *own, *last])}
    return sorted(panels, key=lambda panel: order[panel["group"]])


def _find_group(name: str, validated: set[str]) -> str:
    if "loss" in name.lower():
        return "Losses"
    if name in validated:
        return "Metrics"
    if name in (*_TIMES, "memory"):
        return "Time and memory"
    if name.endswith(_RATES) or name.split("/")[0] in _RATES:
        return "Learning rates"
    return name.split("/")[0] if "/" in name else "Training"


def _read_speed(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the speed in the last summary; {} before the end of the run."""
    speeds = ({name: x for name, x in row.items() if name.startswith("speed/")} for row in reversed(rows))
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
            if content is not None and content.startswith(_PNG):
                url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
                shown[-1]["items"].append({"step": step, "url": url})
            elif content is not None:
                run.files.note(path, "it must be a PNG file")
    return shown, max(0, len(run.images) - MAX_IMAGE_NAMES)


def _flatten(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the leaves in a config as text by dotted path; a list without dicts is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flatten(item, f"{path}[{index}]")
    elif path:
        yield path, repr(value)
