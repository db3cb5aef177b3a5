"""Tracebacks of threads that a failed save leaves behind."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ignore_closed_event_loops() -> Iterator[None]:
    """Drop the tracebacks of TensorStore's threads that still report to the event loop of a failed save."""
    previous = sys.unraisablehook

    def report(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    # TensorStore calls back in threads of its own, where no `except` can be
    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = previous
