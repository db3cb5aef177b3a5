"""Watch for non-finite losses among the scalars that are fetched for the log."""

import math
import threading
from collections.abc import Sequence

_LOSS = "train/loss"
# of a loss scale and of hooks; with several optimizers the optimizer's name follows
_COUNTERS = ("train/skipped_steps", "train/dropped_steps")
WATCHED = (_LOSS, *_COUNTERS)


class NonFiniteLossError(FloatingPointError, AssertionError):
    """Infinite or NaN loss; also an AssertionError, which MMEngine raises.

    Attributes:
      iteration: the iteration that computed it; None if unknown.
    """

    iteration: int | None = None


class LossWatch:
    """Record of non-finite losses, except in steps that a loss scale skipped or a hook dropped.

    When a counter of such steps grows, all steps since its previous value are excluded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # log lines are written in another thread
        self._bad: list[tuple[int, float]] = []  # iteration and value of each non-finite loss
        # the iteration and the value that were seen last
        self._counters: dict[str, tuple[int, float]] = {}
        self._dropped: list[tuple[int, int]] = []  # first and last iteration

    def add(
        self, key: str, iterations: Sequence[int], values: Sequence[float], before: float
    ) -> None:
        """Add the fetched values of any scalar, in order; most names are ignored.

        `before` is the value that precedes them, 0 without one.
        """
        if key != _LOSS and not key.startswith(_COUNTERS):
            return
        with self._lock:
            if key == _LOSS:
                if not all(map(math.isfinite, values)):
                    pairs = zip(iterations, values, strict=True)
                    self._bad += [
                        (iteration, value) for iteration, value in pairs if not math.isfinite(value)
                    ]
                return
            # All earlier iterations belong to the first value: an accumulation window reports the
            # counter at its end.
            last, count = self._counters.get(key, (-1, before))
            for iteration, value in zip(iterations, values, strict=True):
                if value > count:
                    self._dropped.append((last + 1, iteration))
                # a dropped step does not report the counter of a loss scale
                if not math.isnan(value):
                    last = iteration
                    count = value
            self._counters[key] = last, count

    def pop(self, last: float = math.inf, *, waits: bool = False) -> tuple[int, float] | None:
        """Return iteration and value of the first non-finite loss in a step that counts, and forget
        those seen.

        Args:
          last: the last iteration to consider; later losses are kept.
          waits: keep losses without a later value of a counter, as within an accumulation window,
            which a loss scale skips as a whole.
        """
        with self._lock:
            if not self._bad:  # nearly always
                self._dropped = []
                return None
            known = (
                max((last for last, _ in self._counters.values()), default=-1)
                if waits
                else math.inf
            )
            decided = [entry for entry in self._bad if entry[0] <= min(known, last)]
            self._bad = self._bad[len(decided) :]
            counted = (
                e
                for e in decided
                if not any(first <= e[0] <= last for first, last in self._dropped)
            )
            found = next(counted, None)
            if not self._bad:
                self._dropped = []
            return found
