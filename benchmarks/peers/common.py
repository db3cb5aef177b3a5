"""What all peers share: the task, in NumPy, and the clock, which sits in the data.

A tiny network: 32 features, a hidden layer of 32 with tanh, 10 classes, batches of 32, SGD with momentum, one iteration
after the other, a log line every 10. No trainer knows that it is timed: the data notes when its batches are asked for.
Only NumPy is imported here, for each peer has an environment of its own.
"""

import gc
import json
import math
import os
import statistics
import sys
import threading
import time

import numpy as np

FEATURES, HIDDEN, CLASSES, BATCH = 32, 32, 10, 32
RATE, MOMENTUM = 1e-3, 0.9
LOG_EVERY = 10
WARM_UP = 300
ITERS, ITERS_OF_SLOW = 20_000, 2_000  # seconds of training for those that take a tenth of a millisecond, and others


def make_batches(count=16):
    """Host batches `(x f32[B, 32], y int32[B])`."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, BATCH, FEATURES), np.float32)
    y = rng.integers(0, CLASSES, (count, BATCH)).astype(np.int32)
    return list(zip(x, y, strict=True))


class TimedData:
    """Batches for one run, which note what an iteration takes once the first ones are over.

    Args:
      iters: how many iterations are timed.
      pack: what a trainer takes as a batch, made of `(x, y)`.

    Attributes:
      seconds: wall time and the main thread's time on a core, for `iters - 1` iterations; None before they are done.
        The latter is NaN where another thread asks for the batches.
    """

    def __init__(self, iters, pack):
        self._iters = iters
        self._batches = [pack(x, y) for x, y in make_batches()]
        self.seconds = None

    def __len__(self):
        return WARM_UP + self._iters

    def __iter__(self):
        for i in range(len(self)):
            if i == WARM_UP:
                wall, thread = time.perf_counter(), _main_thread_time()
            if i == len(self) - 1 and self.seconds is None:
                self.seconds = time.perf_counter() - wall, _main_thread_time() - thread
            yield self._batches[i % len(self._batches)]


def _main_thread_time():
    return time.thread_time() if threading.current_thread() is threading.main_thread() else math.nan


def compare(loops, version, iters=ITERS, rounds=3):
    """Runs loops in turns and writes what an iteration takes, in microseconds, as JSON to the file named first.

    Args:
      loops: name -> `(run, pack)`; `run(data)` trains over the `TimedData` once.
      version: of the trainer.
      iters: how many iterations are timed.
      rounds: how often; medians count.
    """
    found = {name: [] for name in loops}
    for _ in range(rounds):
        for name, (run, pack) in loops.items():
            gc.collect()
            data = TimedData(iters, pack)
            run(data)
            found[name].append([value / (iters - 1) * 1e6 for value in data.seconds])
    times = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    with open(sys.argv[1], "w") as file:
        json.dump({"version": version, "times": times}, file)


class Log:
    """A plain log: the mean loss of the last iterations, a line to the terminal."""

    def __init__(self):
        self._terminal = open(os.devnull, "w")  # noqa: SIM115 - open to the end of the process

    def write(self, i, loss):
        """A line."""
        print(f"step {i} loss {loss:.4f}", file=self._terminal, flush=True)
