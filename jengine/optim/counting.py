"""Which iterations update the parameters, and by what an accumulated gradient is divided. Host arithmetic."""


class Accumulation:
    """Counts iterations and knows the windows of gradient accumulation.

    A window is `counts` iterations; when the number of iterations is known and `counts` does not divide it, the rest
    makes a last window of its own, so that no gradient is lost.

    Args:
      counts: iterations in a window, at least 1.
    """

    def __init__(self, counts: int = 1) -> None:
        if isinstance(counts, bool) or not isinstance(counts, int):
            raise TypeError(f"accumulative_counts must be an int, found {type(counts).__name__}: {counts!r}")
        if counts < 1:
            raise AssertionError(f"accumulative_counts must be at least 1, found {counts}")
        self.counts = counts
        self.done = 0
        self.total = -1  # unknown: then there is no last window

    def initialize(self, done: int, total: int) -> None:
        """Says where training stands: `done` iterations of `total`; -1 for an unknown total."""
        self.done, self.total = int(done), int(total)

    def advance(self) -> bool:
        """Counts one iteration; True when it ends a window."""
        self.done += 1
        return self.ends_window(self.done)

    def ends_window(self, count: int) -> bool:
        """Whether the `count`-th iteration, from 1, updates the parameters."""
        return count % self.counts == 0 or count == self.total

    def factor(self) -> int:
        """The number of iterations in the window of the iteration that `advance` counted last (the first at start)."""
        index = max(self.done - 1, 0)
        rest = self.total % self.counts if self.total > 0 else 0
        return rest if rest and self.total - rest <= index < self.total else self.counts
