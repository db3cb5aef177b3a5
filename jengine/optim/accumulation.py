"""Decide on the host which iterations update the parameters, and the divisor of accumulated gradients."""


class Accumulation:
    """Count iterations and the windows of gradient accumulation.

    A window is `counts` iterations; when the number of iterations is known and not divisible by `counts`, the last
    window is shorter, so that no gradient is lost.

    Args:
      counts: iterations in a window, at least 1.
    """

    def __init__(self, counts: int = 1) -> None:
        self.counts = counts
        self.done = 0
        self.total = -1  # unknown: then there is no last window

    def initialize(self, done: int, total: int) -> None:
        """Set the position of training: `done` iterations of `total`; -1 for an unknown total."""
        self.done, self.total = int(done), int(total)

    def start_step(self, step: int | None = None) -> bool:
        """Count one iteration, the one after `step` others; return whether it ends a window."""
        self.done = (self.done if step is None else step) + 1
        return self.is_update(self.done)

    def is_update(self, count: int) -> bool:
        """Return whether the `count`-th iteration, from 1, updates the parameters."""
        return count % self.counts == 0 or count == self.total

    def window_size(self) -> int:
        """Return the iterations in the window of the iteration that `start_step` counted last (the first at start)."""
        index = max(self.done - 1, 0)
        rest = self.total % self.counts if self.total > 0 else 0
        return rest if rest and self.total - rest <= index < self.total else self.counts
