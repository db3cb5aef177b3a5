"""Gradient accumulation on the host: which iterations update the parameters, and what divides the summed gradients."""

import math


class Accumulation:
    """Counter for iterations and accumulation windows.

    If the run length is known and not divisible by `counts`, the last window is shorter, so that no gradient is lost.

    >>> windows = Accumulation(counts=3)
    >>> windows.initialize(done=0, total=5)
    >>> [windows.start_step() for _ in range(5)], windows.window_size()
    ([False, False, True, False, True], 2)

    Args:
      counts: iterations in a window, at least 1.
    """

    def __init__(self, counts: int = 1) -> None:
        self.counts = counts
        self.done = 0
        self.total = -1  # unknown: no window is shorter

    def initialize(self, done: int, total: int | float) -> None:
        """Set the training progress: `done` iterations out of `total`; -1 or `math.inf` for an unknown total."""
        self.done, self.total = int(done), -1 if math.isinf(total) else int(total)

    def start_step(self, step: int | None = None) -> bool:
        """Count the iteration after `step` others (None: the next one); return whether it ends a window."""
        self.done = done = (self.done if step is None else step) + 1
        return done % self.counts == 0 or done == self.total

    def is_update(self, count: int) -> bool:
        """Return whether the `count`-th iteration, from 1, updates the parameters."""
        return count % self.counts == 0 or count == self.total

    def window_size(self) -> int:
        """Return the number of iterations in the window of the current iteration (before training, of the first)."""
        index = max(self.done - 1, 0)
        remainder = self.total % self.counts if self.total > 0 else 0
        return remainder if remainder and self.total - remainder <= index < self.total else self.counts
