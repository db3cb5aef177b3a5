"""Compare the speed of training loops on a machine with other load.

The loops run in turns, block by block, so that a slow period of the machine affects all of them. A
time is the median over the turns of a round, in the fastest round, because noise only adds time.
The CPU time of the main thread and of the whole process is measured next to the wall time, which on
a busy machine includes waiting for a core.
"""

import gc
import itertools
import math
import statistics
import time
from typing import NamedTuple


class Ratio(NamedTuple):
    """Hold a median and its 95 % confidence interval."""

    median: float
    low: float
    high: float

    def __str__(self):
        return f"{self.median:.3f} ({self.low:.2f}-{self.high:.2f})"


class Times(NamedTuple):
    """Hold the time per iteration of a loop, in microseconds, and its comparison with the reference
    loop.

    Attributes:
      wall: wall time.
      thread: CPU time of the main thread.
      wall_overhead, thread_overhead: differences to the reference loop, medians over all turns.
      ratio: ratio of the wall times, median over all turns.
      cpu_ratio: ratio of the CPU times of the whole process, median over all turns.
    """

    wall: float
    thread: float
    wall_overhead: float
    thread_overhead: float
    ratio: Ratio
    cpu_ratio: Ratio


class _Block(NamedTuple):
    wall: float
    thread: float
    cpu: float


def time_block(run, iters):
    """Measure the time per iteration of `run(iters)`, in microseconds."""
    begin = time.perf_counter(), time.thread_time(), time.process_time()
    run(iters)
    end = time.perf_counter(), time.thread_time(), time.process_time()
    return _Block(
        *((after - before) / iters * 1e6 for before, after in zip(begin, end, strict=True))
    )


def compare(loops, block, turns, rounds):
    """Measure several loops in turns.

    A ratio or difference is the median over all turns, each comparing a block of the loop with an
    adjacent block of the first loop: this is more precise than the times themselves, because the
    load of the machine is the same for both.

    Args:
      loops: name -> `run(iters)`; all are compared with the first.
      block: iterations in a block.
      turns: blocks of each loop in a round.
      rounds: number of rounds.

    Returns:
      name -> `Times`.
    """
    measured = {name: [] for name in loops}  # a list of blocks for each round
    order = list(loops)
    for _ in range(rounds):
        gc.collect()
        for blocks in measured.values():
            blocks.append([])
        for _ in range(turns):
            for name in order:
                measured[name][-1].append(time_block(loops[name], block))
            order.append(order.pop(0))  # avoid that a loop always follows the same one
    reference = list(itertools.chain(*measured[next(iter(loops))]))
    return {name: _summarize(rounds, reference) for name, rounds in measured.items()}


def _summarize(rounds, reference):
    pairs = list(zip(itertools.chain(*rounds), reference, strict=True))
    return Times(
        min(statistics.median(block.wall for block in blocks) for blocks in rounds),
        min(statistics.median(block.thread for block in blocks) for blocks in rounds),
        statistics.median(block.wall - other.wall for block, other in pairs),
        statistics.median(block.thread - other.thread for block, other in pairs),
        _summarize_ratios([block.wall / other.wall for block, other in pairs]),
        _summarize_ratios([block.cpu / other.cpu for block, other in pairs]),
    )


def _summarize_ratios(ratios):
    ratios = sorted(ratios)
    # ranks of the confidence interval of the median: half the sample plus or minus 1.96 standard
    # deviations
    half_width = 0.98 * math.sqrt(len(ratios))
    low = math.floor(len(ratios) / 2 - half_width)
    high = math.ceil(len(ratios) / 2 + half_width)
    return Ratio(statistics.median(ratios), ratios[max(low, 0)], ratios[min(high, len(ratios)) - 1])
