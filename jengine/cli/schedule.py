"""`jengine schedule`: the optimizer's hyperparameters over the whole run, drawn as curves."""

import argparse
from collections.abc import Mapping, Sequence

from jengine.cli.commands import load
from jengine.cli.schedule_curves import preview_schedules
from jengine.errors import require_extra

_WIDTH, _HEIGHT = 72, 10


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Draw the schedules in the terminal, or save them as a PNG file."""
    curves = preview_schedules(load(args, overrides), args.epoch_length)
    varying = {name: values for name, values in curves.items() if min(values) != max(values)}
    constant = {name: values[0] for name, values in curves.items() if name not in varying}
    if args.png:
        _save_png(varying or curves, args.png)
        print(f"saved to {args.png}")
    else:
        for name, values in varying.items():
            print(plot(values, name), end="\n\n")
    if constant:
        print("constant: " + ", ".join(f"{name} {value:g}" for name, value in constant.items()))


def plot(values: Sequence[float], name: str, width: int = _WIDTH, height: int = _HEIGHT) -> str:
    """Draw a curve, one number per iteration, as text in `height` rows and at most `width` columns.

    >>> print(plot([0.0, 1.0, 2.0], "lr", height=3))
    lr: 0 to 2, between 0 and 2
    2 |  *
      | *
    0 |*
      +---
       0 2
    """
    width = min(width, len(values))
    columns = [values[round(i * (len(values) - 1) / max(width - 1, 1))] for i in range(width)]
    low, high = min(values), max(values)
    rows = [round((value - low) / ((high - low) or 1.0) * (height - 1)) for value in columns]
    margin = max(len(f"{low:.3g}"), len(f"{high:.3g}"))
    lines = [f"{name}: {values[0]:.4g} to {values[-1]:.4g}, between {low:.4g} and {high:.4g}"]
    for row in reversed(range(height)):
        label = {height - 1: f"{high:.3g}", 0: f"{low:.3g}"}.get(row, "")
        cells = "".join("*" if r == row else " " for r in rows)
        lines.append(f"{label:>{margin}} |{cells}".rstrip())
    lines.append(" " * margin + " +" + "-" * width)
    last = str(len(values) - 1)
    lines.append(" " * (margin + 2) + "0" + last.rjust(width - 1))
    return "\n".join(lines)


def _save_png(curves: Mapping[str, Sequence[float]], path: str) -> None:
    with require_extra("plot", "--png requires matplotlib"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(curves), 1, sharex=True, squeeze=False, figsize=(8, 2.2 * len(curves) + 0.6))
    for axis, (name, values) in zip(axes[:, 0], curves.items(), strict=True):
        axis.plot(values)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("iteration")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
