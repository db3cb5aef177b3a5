"""Define the task in NumPy and the timing, shared by all peers.

The task is a tiny network: 32 features, a hidden layer of 32 with tanh, 10 classes, batches of 32,
  SGD with momentum,
single steps, a log line every 10 iterations. The time is measured in the data, when a batch is
requested, so that it does not depend on the trainer. Only NumPy is imported here, because each peer
has its own environment.
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

FEATURES = 32
HIDDEN = 32
CLASSES = 10
BATCH = 32
RATE = 1e-3
MOMENTUM = 0.9
LOG_EVERY = 10
WARM_UP = 300
# a few seconds of training at about 0.1 and 1 ms per iteration
ITERS = 20_000
SLOW_ITERS = 2_000


def make_batches(count=16):
    """Return host batches `(x f32[B, 32], y int32[B])`."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, BATCH, FEATURES), np.float32)
    y = rng.integers(0, CLASSES, (count, BATCH)).astype(np.int32)
    return list(zip(x, y, strict=True))


class TimedData:
    """Provide the batches of one run and measure the time per iteration after a warm-up.

    Args:
      iters: number of measured iterations.
      pack: converts `(x, y)` to a batch of the trainer.

    Attributes:
      seconds: wall time and CPU time of the main thread for `iters - 1` iterations; None until they
        are done. The CPU time is NaN if another thread requests the batches.
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
                wall = time.perf_counter()
                thread = _main_thread_time()
            if i == len(self) - 1 and self.seconds is None:
                self.seconds = time.perf_counter() - wall, _main_thread_time() - thread
            yield self._batches[i % len(self._batches)]


def _main_thread_time():
    return time.thread_time() if threading.current_thread() is threading.main_thread() else math.nan


def compare(loops, version, iters=ITERS, rounds=3):
    """Run loops in turns; write the microseconds per iteration as JSON to the file in
    `sys.argv[1]`.

    Args:
      loops: name -> `(run, pack)`; `run(data)` trains on the `TimedData` once.
      version: the version of the trainer.
      iters: number of measured iterations.
      rounds: number of runs per loop; the results are medians.
    """
    measured = {name: [] for name in loops}
    for _ in range(rounds):
        for name, (run, pack) in loops.items():
            gc.collect()
            data = TimedData(iters, pack)
            run(data)
            measured[name].append([value / (iters - 1) * 1e6 for value in data.seconds])
    times = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in measured.items()
    }
    with open(sys.argv[1], "w") as file:
        json.dump({"version": version, "times": times}, file)


class Log:
    """Write the mean loss of the last iterations, one line each."""

    def __init__(self):
        self._file = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends

    def write(self, i, loss):
        """Write a line."""
        print(f"step {i} loss {loss:.4f}", file=self._file, flush=True)
