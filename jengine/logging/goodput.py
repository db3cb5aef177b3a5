"""Goodput: the share of a run's time that went into training steps which count."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_TRAINING = ("step", "input", "hooks", "logging")  # the phases that lost iterations have spent


class Goodput(NamedTuple):
    """Where the time of all sessions of a run went.

    Attributes:
      seconds: time by phase, see `PhaseTimer`, without the lost iterations.
      lost_seconds: time of iterations that ran again after a resume.
      lost_iterations: the number of these iterations.
      sessions: number of sessions.
    """

    seconds: dict[str, float]
    lost_seconds: float
    lost_iterations: int
    sessions: int

    @property
    def total(self) -> float:
        """The seconds of all sessions, without the time between them."""
        return sum(self.seconds.values()) + self.lost_seconds

    @property
    def share(self) -> float:
        """The share of the time that was spent in steps."""
        return self.seconds.get("step", 0.0) / self.total if self.total else 0.0


def measure_goodput(sessions: Sequence[Mapping[str, Any]]) -> Goodput:
    """Return where the time went, over the sessions of one run.

    A killed session has iterations after its newest checkpoint, which the next session repeats:
      they are lost.

    Args:
      sessions: in order, with the first iteration `first_iter`, the completed iterations `iter` at
        the end or at the last update before a kill, and the `seconds` by phase until then.

    Examples:
      >>> killed = dict(first_iter=0, iter=100, seconds={"step": 40.0, "compile": 10.0})
      >>> resumed = dict(first_iter=75, iter=200, seconds={"step": 50.0})
      >>> goodput = measure_goodput([killed, resumed])
      >>> goodput.lost_iterations, goodput.lost_seconds, goodput.share
      (25, 10.0, 0.8)
    """
    seconds: Counter[str] = Counter()
    lost_seconds = 0.0
    lost_iterations = 0
    kept = float("inf")
    # a later session may also repeat iterations of several earlier ones
    for session in reversed(sessions):
        first = session.get("first_iter", 0)
        last = session.get("iter", 0)
        lost = int(max(last - max(first, kept), 0))
        kept = min(kept, first)
        share = lost / (last - first) if lost else 0.0
        lost_iterations += lost
        for phase, value in session.get("seconds", {}).items():
            part = value * share if phase in _TRAINING else 0.0
            lost_seconds += part
            seconds[phase] += value - part
    return Goodput(dict(seconds.most_common()), lost_seconds, lost_iterations, len(sessions))
