"""Where the time of a run went, and goodput: the share in training steps which count."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jengine.hooks.run_record import read_sessions, update_record
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.tables import format_table
from jengine.train.recompilation import compilation_counter

_TRAINING = ("step", "input", "hooks", "logging")  # the phases that lost iterations have spent


class Goodput(NamedTuple):
    """Where the time of all sessions of a run went.

    Attributes:
      seconds: time by phase, see `Stopwatch`, without the lost iterations.
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


def report_time(
    runner: RunnerProtocol, seconds: Mapping[str, float], speed: float
) -> tuple[dict[str, tuple[float, str]], list[str]]:
    """Return the goodput and a table with the time by phase, for the report at the end of a run.

    Args:
      runner: the run.
      seconds: the time of this session by phase.
      speed: iterations per second; 0 for a session without iterations.
    """
    update_record(runner)
    goodput = measure_goodput(read_sessions(runner))
    rates = {}
    if speed and goodput.sessions:
        rates = {
            "goodput": (goodput.share, ""),
            "lost_iterations": (float(goodput.lost_iterations), ""),
            "lost_seconds": (goodput.lost_seconds, ""),
        }
    return rates, format_time(seconds, goodput)


def format_time(seconds: Mapping[str, float], goodput: Goodput) -> list[str]:
    """Return a table with the time by phase, and lines with the goodput and the compilation cache.

    Args:
      seconds: the time of this session by phase.
      goodput: the times of all sessions, which are shown if there are several.
    """
    total = sum(seconds.values())
    columns = ["part", "seconds", "share"]
    rows = [[phase, *_share(x, total)] for phase, x in seconds.items()]
    lost = ""
    # Only a resumed run has columns for all sessions; for others they would repeat the first ones.
    if goodput.sessions > 1:
        columns += [f"all {goodput.sessions} sessions", "share"]
        rows += [[phase, "", ""] for phase in goodput.seconds if phase not in seconds]
        rows = [[*row, *_share(goodput.seconds.get(row[0], 0.0), goodput.total)] for row in rows]
        rows.append(["lost steps", "", "", *_share(goodput.lost_seconds, goodput.total)])
        lost = f" over all sessions; {goodput.lost_iterations:,} iterations were lost and ran again"
    rows.append(
        [
            "all",
            *_share(total, total),
            *(_share(goodput.total, goodput.total) if goodput.sessions > 1 else []),
        ]
    )
    table = format_table(columns, rows, title="Time")
    lines = [table]
    if goodput.sessions:
        lines.append(f"goodput: {goodput.share:.1%} of the time in steps{lost}")
    hits = compilation_counter.cache_hits
    misses = compilation_counter.cache_misses
    return [*lines, f"compilation cache: {hits} programs found, {misses} compiled"]


def _share(seconds: float, total: float) -> list[str]:
    return [f"{seconds:.2f}", f"{seconds / total if total else 0.0:.1%}"]
