"""Compare loops by the clock on a machine with other load.

The loops run in turns, block by block, so that a slow moment of the machine affects all of them. A round is some turns,
of which the median counts; of the rounds the fastest one, because disturbances only ever add. Besides the wall time the
CPU time is kept, of the main thread and of the whole process: on a busy machine the wall time also
contains the waiting for a core.
"""

import gc
import itertools
import math
import statistics
import time
from typing import NamedTuple


class Ratio(NamedTuple):
    """Hold a median, and the interval that contains the true one in 19 of 20 measurements."""

    median: float
    low: float
    high: float

    def __str__(self):
        return f"{self.median:.3f} ({self.low:.2f}-{self.high:.2f})"


class Times(NamedTuple):
    """Hold the time of an iteration, in microseconds, and its ratio to that of the loop that all are compared with.

    Attributes:
      wall: by the clock.
      thread: on a core, in the main thread.
      wall_more, thread_more: their excess, the median over all turns.
      ratio: of the wall time, over all turns.
      cpu_ratio: of the whole process's time on all cores, likewise.
    """

    wall: float
    thread: float
    wall_more: float
    thread_more: float
    ratio: Ratio
    cpu_ratio: Ratio


class _Block(NamedTuple):
    wall: float
    thread: float
    cpu: float


def time_block(run, iters):
    """Return the time of an iteration of `run(iters)`, in microseconds."""
    begin = time.perf_counter(), time.thread_time(), time.process_time()
    run(iters)
    end = time.perf_counter(), time.thread_time(), time.process_time()
    return _Block(*((after - before) / iters * 1e6 for before, after in zip(begin, end, strict=True)))


def compare(loops, block, turns, rounds):
    """Return the times of several loops, measured in turns.

    A ratio or difference is the median over all turns, each of them a block of the loop against a neighbouring block of
    the first one: that is finer than the times themselves, since the machine is as quiet or busy for both.

    Args:
      loops: name -> `run(iters)`; all are compared with the first.
      block: iterations in a block.
      turns: blocks of each loop in a round.
      rounds: number of rounds.

    Returns:
      name -> `Times`.
    """
    found = {name: [] for name in loops}  # a list of blocks for each round
    order = list(loops)
    for _ in range(rounds):
        gc.collect()
        for blocks in found.values():
            blocks.append([])
        for _ in range(turns):
            for name in order:
                found[name][-1].append(time_block(loops[name], block))
            order.append(order.pop(0))  # no loop always comes after the same one
    first = list(itertools.chain(*found[next(iter(loops))]))
    return {name: _times(own_rounds, first) for name, own_rounds in found.items()}


def _times(own_rounds, first):
    pairs = list(zip(itertools.chain(*own_rounds), first, strict=True))
    return Times(
        min(statistics.median(own.wall for own in blocks) for blocks in own_rounds),
        min(statistics.median(own.thread for own in blocks) for blocks in own_rounds),
        statistics.median(own.wall - other.wall for own, other in pairs),
        statistics.median(own.thread - other.thread for own, other in pairs),
        _ratio([own.wall / other.wall for own, other in pairs]),
        _ratio([own.cpu / other.cpu for own, other in pairs]),
    )


def _ratio(ratios):
    ratios = sorted(ratios)
    # the ranks of the median's interval in a sorted sample: half the sample, plus or minus two standard deviations
    reach = 0.98 * math.sqrt(len(ratios))
    low, high = math.floor(len(ratios) / 2 - reach), math.ceil(len(ratios) / 2 + reach)
    return Ratio(statistics.median(ratios), ratios[max(low, 0)], ratios[min(high, len(ratios)) - 1])
