"""Table of the validations in a run, with the best of each metric."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jengine.config.scores import infer_rule, keep_best
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.tables import format_table, shorten_rows

Validation = tuple[int, int, Mapping[str, Any]]  # epoch, iteration and metrics

_MAX_ROWS = 21


def list_validations(
    runner: RunnerProtocol, seconds: Mapping[str, float], speed: float
) -> tuple[dict[str, tuple[float, str]], list[str]]:
    """Return the table of a run's validations for the report at its end."""
    validations = runner.run.validations
    monitored = [
        (name, rule) for hook in runner.hooks for _, name, rule in hook.monitored_metrics()
    ]
    by_epoch = runner.train_loop.by_epoch
    if not validations:
        return {}, []
    return {}, [format_validations(validations, by_epoch=by_epoch, monitored=monitored)]


def format_validations(
    validations: Sequence[Validation], *, by_epoch: bool, monitored: Iterable[tuple[str, str]] = ()
) -> str:
    """Return a table with a row for each validation and the metrics that are best in it.

    A long table is cut in the middle, except for the best rows. The first of equal values is the
    best.

    >>> print(format_validations([(1, 10, {"acc": 0.5}), (2, 20, {"acc": 0.75})], by_epoch=True))
    Validations
    +-------+------+--------+------+
    | epoch | iter | acc    | best |
    +-------+------+--------+------+
    | 1     | 10   | 0.5000 |      |
    | 2     | 20   | 0.7500 | acc  |
    +-------+------+--------+------+

    Args:
      validations: epoch, iteration and metrics for each.
      by_epoch: whether to show the epochs as well as the iterations.
      monitored: the metrics to compare, each with 'greater' or 'less' for the better value. Without
        any, the first metric is compared whose name tells the rule.
    """
    names = list(dict.fromkeys(name for _, _, metrics in validations for name in metrics))
    rules = {name: rule for name, rule in monitored if name in names} or _infer_first(names)
    best: dict[int, list[str]] = {}
    for name, rule in rules.items():
        values = [metrics.get(name) for _, _, metrics in validations]
        scores = [x if isinstance(x, int | float) else None for x in values]
        for row in keep_best(scores, count=1, rule=rule):
            best.setdefault(row, []).append(name)
    rows = [
        [
            str(epoch),
            str(iteration),
            *(_format_number(metrics.get(name)) for name in names),
            ", ".join(best.get(i, [])),
        ]
        for i, (epoch, iteration, metrics) in enumerate(validations)
    ]
    # Columns without information are left out: epochs of a run by iterations, and who is best if
    # nobody can be.
    first = 0 if by_epoch else 1
    last = None if best else -1
    shown = shorten_rows([row[first:last] for row in rows], _MAX_ROWS, best)
    return format_table(["epoch", "iter", *names, "best"][first:last], shown, title="Validations")


def _infer_first(names: Sequence[str]) -> dict[str, str]:
    for name in names:
        with contextlib.suppress(ValueError):
            return {name: infer_rule(name)}
    return {}


def _format_number(value: object) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
