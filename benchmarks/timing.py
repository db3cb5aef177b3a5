"""Compares loops by the clock on a machine that others use too.

The loops run in turns, block by block, so that a slow moment strikes all of them. A round is some turns, of which the
median counts; of the rounds the quietest one, for what disturbs only ever adds. Beside the wall time the time that
the main thread was on a core is kept: on a busy machine the wall time also says who had to wait.
"""

import gc
import statistics
import time
from typing import NamedTuple


class Times(NamedTuple):
    """What an iteration takes, in microseconds.

    Attributes:
      wall: by the clock.
      thread: on a core, in the main thread.
      ratio: of the wall time to that of the loop that all are compared with.
    """

    wall: float
    thread: float
    ratio: float = 1.0


def time_block(run, iters):
    """The `Times` of `run(iters)`."""
    wall, thread = time.perf_counter(), time.thread_time()
    run(iters)
    thread, wall = time.thread_time() - thread, time.perf_counter() - wall
    return Times(wall / iters * 1e6, thread / iters * 1e6)


def compare(loops, block, turns, rounds):
    """The times of several loops, measured in turns.

    A ratio is the median over all turns, each of them a block of the loop against a block beside it of the first one:
    that is finer than the times themselves, since the machine is as quiet or busy for both.

    Args:
      loops: name -> `run(iters)`; all are compared with the first.
      block: iterations in a block.
      turns: blocks of each loop in a round.
      rounds: how many rounds.

    Returns:
      name -> `Times`.
    """
    medians = {name: [] for name in loops}
    walls = {name: [] for name in loops}
    order = list(loops)
    for _ in range(rounds):
        gc.collect()
        found = {name: [] for name in loops}
        for _ in range(turns):
            for name in order:
                found[name].append(time_block(loops[name], block))
            order.append(order.pop(0))  # nobody always comes after the same one
        for name, times in found.items():
            walls[name] += [own.wall for own in times]
            medians[name].append([statistics.median(column) for column in zip(*times, strict=True)][:2])
    first = walls[next(iter(loops))]
    ratios = {
        name: statistics.median(own / other for own, other in zip(times, first, strict=True))
        for name, times in walls.items()
    }
    return {name: Times(*map(min, zip(*rows, strict=True)), ratios[name]) for name, rows in medians.items()}
