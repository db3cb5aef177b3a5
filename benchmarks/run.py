"""Measure a whole run of the tiny MLP (data, steps and log), compared with the hand-written loop.

    python -m benchmarks.run [--rounds 5] [--json FILE]

64,000 examples in memory, shuffled in each epoch, in batches of 64; every 10 iterations a line in
the log file and one in a JSON lines file. The hand-written loop creates its batches by fancy
indexing and writes one line. Times are in microseconds per iteration, measured in turns in one
process; a block is an epoch.
"""

import argparse
import os
import tempfile

import numpy as np

from benchmarks.by_hand import HandWrittenLoop
from benchmarks.by_runner import RunnerLoop
from benchmarks.cases import CASES
from benchmarks.report import table, write_ratios
from benchmarks.timing import compare

NUM_EXAMPLES = 64_000
BATCH_SIZE = 64
CHUNKS = (1, 10, 100)


class ShuffledBatches:
    """Provide the batches of an epoch by index; the first index draws a new order."""

    def __init__(self, columns):
        self._columns = columns
        self._rng = np.random.default_rng(0)
        self._order = self._rng.permutation(NUM_EXAMPLES)

    def __len__(self):
        return NUM_EXAMPLES // BATCH_SIZE

    def __getitem__(self, index):
        if index == 0:
            self._order = self._rng.permutation(NUM_EXAMPLES)
        indices = self._order[index * BATCH_SIZE : (index + 1) * BATCH_SIZE]
        return {name: column[indices] for name, column in self._columns.items()}


def main(argv=None):
    """Run the benchmark and print the table."""
    from jengine.data import ArrayDataset

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file to write the ratios to")
    args = parser.parse_args(argv)
    case = CASES[0]
    rng = np.random.default_rng(0)
    columns = {
        "image": rng.standard_normal((NUM_EXAMPLES, *case.shape), np.float32),
        "label": rng.integers(0, 10, NUM_EXAMPLES).astype(np.int32),
    }
    with tempfile.TemporaryDirectory() as work_dir:
        loops = {
            "by hand": HandWrittenLoop(
                case, os.path.join(work_dir, "hand"), 10, batches=ShuffledBatches(columns)
            )
        }
        for size in CHUNKS:
            data = dict(dataset=ArrayDataset(columns), batch_size=BATCH_SIZE, drop_last=True)
            name = "single steps" if size == 1 else f"chunks of {size}"
            loops[name] = RunnerLoop(
                case, os.path.join(work_dir, name), 10, steps_per_call=size, dataloader=data
            )
        for loop in loops.values():
            loop.run(NUM_EXAMPLES // BATCH_SIZE)
        times = compare(
            {name: loop.run for name, loop in loops.items()},
            NUM_EXAMPLES // BATCH_SIZE,
            3,
            args.rounds,
        )
        for loop in loops.values():
            loop.close()
    hand = times.pop("by hand")
    rows = [
        [name, f"{hand.wall:.1f}", f"{time.wall:.1f}", time.ratio, time.cpu_ratio]
        for name, time in times.items()
    ]
    print(table(["", "by hand", "us", "ratio", "CPU ratio"], rows))
    write_ratios(args.json, {f"run, {name}": time.ratio.median for name, time in times.items()})


if __name__ == "__main__":
    main()
