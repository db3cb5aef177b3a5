"""Predictions as a table in the terminal, and as rows for CSV and JSON lines."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jengine.config import paths
from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError
from jengine.config.json_codec import encode
from jengine.logging.tables import format_table, shorten_rows

Row = Mapping[str, Any]
_MAX_ROWS = 20
_MAX_WIDTH = 60  # characters of a cell
_FEW = 4  # numbers in a cell
_MAX_COLUMNS = 1000
# losses and metrics of one class for each example
_ONE_CLASS = {"CrossEntropy", "Accuracy", "SingleLabelMetric", "ConfusionMatrix"}


def add_classes(
    predictions: Any, cfg: Mapping[str, Any], classes: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Return the predicted class and its probability for each example; {} without classes.

    >>> cfg = dict(model=dict(loss=dict(type="CrossEntropy")))
    >>> add_classes(np.log([[1.0, 3.0]]), cfg, ["cat", "dog"])
    [{'predicted': 'dog', 'probability': 0.75}]

    Args:
      predictions: of all examples; logits or probabilities [B, classes] if the config has a loss or
        a metric of one class for each example.
      cfg: the run's config.
      classes: the names, if they are known.
    """
    named = paths.flatten(predictions)
    scores = named.get("logits", next(iter(named.values())) if len(named) == 1 else None)
    count = len(next(iter(named.values())))
    types = set(
        _find_types([cfg.get(name) for name in ("model", "val_evaluator", "test_evaluator")])
    )
    if types.isdisjoint(_ONE_CLASS) or scores is None or scores.ndim != 2 or scores.shape[1] < 2:
        return [{}] * count
    scores = scores.astype(np.float64)
    is_distribution = (scores >= 0).all() and np.allclose(scores.sum(axis=1), 1, atol=1e-3)
    if not is_distribution:
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores = shares / shares.sum(axis=1, keepdims=True)
    has_names = classes is not None and len(classes) == scores.shape[1]
    return [
        {
            "predicted": str(classes[best]) if has_names and classes is not None else int(best),
            "probability": round(float(row[best]), 6),
        }
        for row, best in zip(scores, scores.argmax(axis=1), strict=True)
    ]


def format_predictions(rows: Sequence[Row], found: Sequence[Row], predictions: Any) -> str:
    """Return a table with what names each example, and its class or predictions.

    Of many examples the first and the last ones.
    """
    values = [] if found[0] else [_shorten(x) for x in paths.flatten(predictions).values()]
    names = [] if found[0] else [name or "predictions" for name in paths.flatten(predictions)]
    headings = [*rows[0], *found[0], *names]
    cells = [
        [_cell(cell) for cell in (*row.values(), *extra.values(), *(x[i] for x in values))]
        for i, (row, extra) in enumerate(zip(rows, found, strict=True))
    ]
    return format_table(headings, shorten_rows(cells, _MAX_ROWS))


def write_rows(rows: Sequence[Row], found: Sequence[Row], predictions: Any, style: str) -> bytes:
    """Return the examples, their classes and all predictions as 'csv' or 'jsonl'.

    Raises:
      ConfigError: too many numbers for the columns of a CSV file.
    """
    leaves = {name or "predictions": x for name, x in paths.flatten(predictions).items()}
    taken = {*found[0], *leaves}
    given = [
        {f"input.{name}" if name in taken else name: x for name, x in row.items()} for row in rows
    ]
    if style == "jsonl":
        lines = (
            encode(
                {**row, **extra, **{name: x[i].tolist() for name, x in leaves.items()}},
                for_logs=True,
            )
            for i, (row, extra) in enumerate(zip(given, found, strict=True))
        )
        return "".join(f"{line}\n" for line in lines).encode()
    flat = {name: x.reshape(len(x), -1) for name, x in leaves.items()}
    if (width := sum(x.shape[1] for x in flat.values())) > _MAX_COLUMNS:
        raise ConfigError(
            f"`--out` must be a .npz or .jsonl file for predictions of {width:,} numbers, got .csv"
        )
    names = [
        f"{name}.{i}" if leaves[name].ndim > 1 else name
        for name, x in flat.items()
        for i in range(x.shape[1])
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*given[0], *found[0], *names])
    for i, (row, extra) in enumerate(zip(given, found, strict=True)):
        numbers = [value for x in flat.values() for value in x[i].tolist()]
        writer.writerow([*row.values(), *extra.values(), *numbers])
    return out.getvalue().encode()


def _find_types(node: Any) -> Iterator[str]:
    """Yield the names of all `type` entries in a part of a config."""
    if is_mapping(node):
        kind = node.get("type")
        yield kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        for value in node.values():
            yield from _find_types(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _find_types(value)
    else:
        yield type(node).__name__


def _shorten(values: np.ndarray) -> list[Any]:
    """Return what a table shows of each example's prediction."""
    if values.ndim == 1:
        return values.tolist()
    if values[0].size <= _FEW:
        return [", ".join(f"{x:.4g}" for x in row.reshape(-1).tolist()) for row in values]
    return [f"{values.dtype}{list(values.shape[1:])}"] * len(values)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_WIDTH else f"{text[: _MAX_WIDTH - 1]}…"
