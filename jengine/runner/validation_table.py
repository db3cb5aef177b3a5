"""Format the table of the validations of a run."""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jengine.checkpoint import infer_rule
from jengine.logging import format_table

_MAX_ROWS = 20

Validation = tuple[int, int, Mapping[str, Any]]


def format_validations(
    validations: Sequence[Validation], *, by_epoch: bool, monitored: Iterable[tuple[str, str]] = ()
) -> str:
    """Return a table with a row for each validation and the metrics that are best in it.

    A long table is cut in the middle; the best rows are always shown. Of equal values the last is the best.

    Args:
      validations: epoch, iteration and metrics of each.
      by_epoch: whether to show the epochs, besides the iterations.
      monitored: the metrics to compare, and for each whether its 'greater' or 'less' value is better. If none of them
        was returned, the first metric from whose name the rule can be inferred.
    """
    names = list(dict.fromkeys(name for _, _, metrics in validations for name in metrics))
    rules = {name: rule for name, rule in monitored if name in names} or _infer_first(names)
    best: dict[int, list[str]] = {}
    for name, rule in rules.items():
        if (index := _find_best([metrics.get(name) for _, _, metrics in validations], rule)) is not None:
            best.setdefault(index, []).append(name)
    rows = [
        [str(epoch), str(iteration), *(_format_number(metrics.get(name)) for name in names), ", ".join(best.get(i, []))]
        for i, (epoch, iteration, metrics) in enumerate(validations)
    ]
    first, last = 0 if by_epoch else 1, None if best else -1
    rows = _cut_middle([row[first:last] for row in rows], best)
    return format_table(["epoch", "iter", *names, "best"][first:last], rows, title="Validations")


def _infer_first(names: Sequence[str]) -> dict[str, str]:
    for name in names:
        with contextlib.suppress(ValueError):
            return {name: infer_rule(name)}
    return {}


def _find_best(values: Sequence[Any], rule: str) -> int | None:
    """Return the index of the best number; None if there is none."""
    sign = 1 if rule == "greater" else -1
    scores = [(sign * value, i) for i, value in enumerate(values) if _is_number(value)]
    return max(scores)[1] if scores else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _cut_middle(rows: Sequence[list[str]], kept: Iterable[int]) -> list[list[str]]:
    """Return the first and the last rows and those of `kept`, with the number of rows left out at each gap."""
    half = _MAX_ROWS // 2
    if len(rows) <= _MAX_ROWS:
        return list(rows)
    shown = sorted({*range(half), *kept, *range(len(rows) - half, len(rows))})
    result = []
    for previous, index in zip([-1, *shown], shown, strict=False):
        if gap := index - previous - 1:
            result.append([f"… {gap} more …", *[""] * (len(rows[0]) - 1)])
        result.append(rows[index])
    return result


def _format_number(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
