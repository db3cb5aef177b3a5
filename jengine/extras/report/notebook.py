"""Progress of a training run in a notebook: a bar, and a plot of the loss that grows with the
run.
"""

import html
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

_REDRAW_SECONDS = 0.5  # each picture is a message to the browser
_MAX_POINTS = 500  # of the plot
_WIDTH = 560  # of the plot, in pixels
_HEIGHT = 140


class NotebookProgress:
    """Progress bar of a run with its newest loss, above a plot of all logged losses, in the output
    of the cell.

    The picture is one output that is replaced, at most twice a second, and stays after the run.

    Args:
      total: iterations of the run; None if unknown.
      completed: iterations that were done before.
      clock: returns the time in seconds.
    """

    def __init__(
        self, total: int | None, completed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._total = total
        self._first = completed
        self._completed = completed
        self._started = self._drawn = clock()
        self._points: list[tuple[int, float]] = []
        self._output: Any = None

    def start(self) -> None:
        """Display the picture."""
        from IPython.display import display

        self._output = display(self, display_id=True)

    def add_loss(self, iteration: int, loss: float) -> None:
        """Add a point to the plot.

        It is drawn by the next `update`, as only the thread of the cell may draw.
        """
        if len(self._points) >= 2 * _MAX_POINTS:
            del self._points[1:-1:2]
        self._points.append((iteration, loss))

    def update(self, completed: int) -> None:
        """Set the number of completed iterations, and draw if the last picture is old enough."""
        self._completed = completed
        if self._clock() - self._drawn >= _REDRAW_SECONDS:
            self._draw()

    def stop(self) -> None:
        """Draw the last picture."""
        if self._output is not None:
            self._draw()
            self._output = None

    def _draw(self) -> None:
        self._drawn = self._clock()
        self._output.update(self)

    def __repr__(self) -> str:
        total = "" if self._total is None else f" of {self._total:,}"
        done = self._completed - self._first
        seconds = self._drawn - self._started
        parts = [f"iteration {self._completed:,}{total}"]
        if self._total is not None and done > 0 and self._completed < self._total:
            parts.append(
                f"{_format_seconds(seconds / done * (self._total - self._completed))} left"
            )
        else:
            parts.append(_format_seconds(seconds))
        if self._points:
            parts.append(f"loss {self._points[-1][1]:.4g}")
        return " · ".join(parts)

    def _repr_html_(self) -> str:
        value = "" if self._total is None else f' value="{self._completed}" max="{self._total}"'
        bar = f'<progress{value} style="width:{_WIDTH}px;max-width:100%"></progress>'
        return (
            '<div style="font:13px '
            f'sans-serif">{bar}<div>{html.escape(repr(self))}</div>{plot(self._points)}</div>'
        )


def plot(points: Sequence[tuple[int, float]]) -> str:
    """Return an SVG picture of a curve, with the ranges at its axes.

    '' for fewer than two finite values.

    It uses the color of the text, so that it fits a light and a dark page.

    >>> plot([(10, 2.0)])
    ''

    Args:
      points: x and y, by increasing x.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) < 2:
        return ""
    first = finite[0][0]
    last = finite[-1][0]
    values = [y for _, y in finite]
    low = min(values)
    high = max(values)
    left = 60
    bottom = _HEIGHT - 20
    horizontal = (_WIDTH - left - 4) / max(last - first, 1)
    vertical = (bottom - 8) / ((high - low) or 1.0)
    line = " ".join(
        f"{left + (x - first) * horizontal:.1f},{bottom - (y - low) * vertical:.1f}"
        for x, y in finite
    )
    labels = [(left - 6, 14, "end", f"{high:.4g}"), (left - 6, bottom, "end", f"{low:.4g}")]
    labels += [
        (left, _HEIGHT - 4, "start", f"{first:,}"),
        (_WIDTH - 4, _HEIGHT - 4, "end", f"{last:,}"),
    ]
    texts = [
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
        for x, y, anchor, text in labels
    ]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        'style="max-width:100%;display:block" role="img" aria-label="loss over iterations" '
        f'fill="currentColor" font-size="11"><path d="M{left},4V{bottom}H{_WIDTH - 4}" '
        f'fill="none" stroke="currentColor" opacity=".35"/><polyline points="{line}" fill="none" '
        f'stroke="#3b6fd4" stroke-width="1.8"/>{"".join(texts)}</svg>'
    )


def _format_seconds(seconds: float) -> str:
    """Return a duration as `m:ss` or `h:mm:ss`.

    >>> _format_seconds(3725.2)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
