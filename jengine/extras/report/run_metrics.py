"""Curves, metrics and config values of runs, which the page and the table in the terminal show."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jengine.config.scores import RULES, infer_rule, is_better
from jengine.extras.report.foreign_files import get_dict, is_number

TIMES = ("time", "data_time")
_PROGRESS = ("step", "iter", "epoch", "mode")
_SUMMARY = ("seconds/", "speed/")  # written once, at the end of a run
# in the repr of an object, which differs in each process
ADDRESS = re.compile(r"(?<=[\w>]) at 0x[0-9a-f]+(?=>)")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as JSON lines write them

Points = tuple[list[float], list[float]]


def read_curves(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[dict[tuple[str, str], Points], list[str]]:
    """Return curves over the training iterations by `(mode, name)`, and the names of values that
    are not numbers.

    >>> read_curves([{"step": 1, "iter": 1, "mode": "train", "loss": 0.5, "note": "text"}])
    ({('train', 'loss'): ([1], [0.5])}, ['note'])

    Args:
      rows: lines in the scalar file. `mode` is the loop; lines without a mode belong to training,
        if they have an `iter`, or are a user's own scalars; else, with a `data_time`, to a
        validation after the training line before.
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
            if (
                name in _PROGRESS
                or name.startswith(_SUMMARY)
                or (mode != "train" and name in TIMES)
            ):
                continue
            if not isinstance(value, float) and not is_number(value) and value not in _NOT_FINITE:
                others[name] = None
                continue
            x, y = curves.setdefault((mode, name.removeprefix(f"{mode}/")), ([], []))
            x.append(step)
            y.append(float(value))
    return curves, list(others)


def compare_configs(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each dotted path in any of the configs: `path`, `values` ('' if absent) and
    `differs`.

    >>> compare_configs([{"lr": 0.1}, {"lr": 0.2}])
    [{'path': 'lr', 'values': ['0.1', '0.2'], 'differs': True}]
    """
    flat = [
        {path: repr(value) for path, value in flatten_config(config).items()} for config in configs
    ]
    rows = {path: [found.get(path, "") for found in flat] for path in sorted(set().union(*flat))}
    return [
        {"path": path, "values": values, "differs": len(set(values)) > 1}
        for path, values in rows.items()
    ]


def flatten_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves in a config by dotted path; a list without dicts is a leaf.

    >>> flatten_config({"optimizer": {"lr": 0.1}, "hooks": [{"interval": 5}], "widths": [8, 16]})
    {'optimizer.lr': 0.1, 'hooks[0].interval': 5, 'widths': [8, 16]}
    """
    return dict(_flatten(config, ""))


def find_best(
    curves: Mapping[tuple[str, str], Points], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the best and the last value of each validation metric.

    The best only if the rule is known.
    """
    found = []
    for (mode, name), (x, y) in curves.items():
        if mode != "val":
            continue
        rule = find_rule(name, config)
        best: dict[str, float] | None = None
        for position, value in zip(x, y, strict=True) if rule else ():
            if is_better(rule, value, best["value"] if best else None):
                best = {"value": value, "iter": position}
        last = y[-1] if math.isfinite(y[-1]) else None
        found.append({"metric": name, "rule": rule, "best": best, "last": last, "count": len(y)})
    return found


def find_rule(metric: str, config: Mapping[str, Any]) -> str:
    """Return 'greater', 'less' or '', as a hook in the config sets it, else from the metric's name.

    >>> find_rule(
    ...     "gap",
    ...     {"custom_hooks": [{"type": "EarlyStoppingHook", "monitor": "gap", "rule": "less"}]},
    ... )
    'less'
    """
    defaults = get_dict(config, "default_hooks")
    customs = config.get("custom_hooks")
    hooks = [*defaults.values(), *(customs if isinstance(customs, list | tuple) else [customs])]
    hooks = [hook for hook in hooks if isinstance(hook, Mapping)]
    for hook in hooks:
        names = _as_list(hook.get("save_best")) or _as_list(hook.get("monitor"))
        rules = _as_list(hook.get("rule"))
        for name, rule in zip(
            names, rules * len(names) if len(rules) == 1 else rules, strict=False
        ):
            if name == metric and rule in RULES:
                return str(rule)
    keys = [[key for hook in hooks for key in _as_list(hook.get(f"{rule}_keys"))] for rule in RULES]
    try:
        return infer_rule(metric, *keys)
    except ValueError:
        return ""


def list_saved_metrics(config: Mapping[str, Any]) -> list[Any]:
    """Return the metrics for which the config's checkpoint hook saves the best checkpoint."""
    return _as_list(get_dict(config, "default_hooks", "checkpoint").get("save_best"))


def _as_list(value: Any) -> list[Any]:
    return (
        [value]
        if isinstance(value, str)
        else list(value)
        if isinstance(value, list | tuple)
        else []
    )


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flatten(item, f"{path}[{index}]")
    elif path:
        yield path, ADDRESS.sub("", value) if isinstance(value, str) else value
