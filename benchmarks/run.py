"""Measure a whole run of the tiny MLP: data, steps and log, against the loop by hand.

    python -m benchmarks.run [--rounds 5] [--json FILE]

64,000 rows in memory, shuffled in each epoch, batches of 64, and every 10 iterations a line in the log file and
one in a file of JSON lines. The loop by hand draws its batches by fancy indexing and writes one line. Times are
microseconds an iteration, measured in turns in one process; a block is an epoch.
"""

import argparse
import os
import tempfile

import numpy as np

from benchmarks.by_hand import ByHand
from benchmarks.by_runner import ByRunner
from benchmarks.cases import CASES
from benchmarks.report import table, write_ratios
from benchmarks.timing import compare

ROWS, BATCH_SIZE = 64_000, 64
CHUNKS = (1, 10, 100)


class ShuffledBatches:
    """Yield the batches of an epoch by index, in a new order from the first one on."""

    def __init__(self, columns):
        self._columns = columns
        self._rng = np.random.default_rng(0)
        self._order = self._rng.permutation(ROWS)

    def __len__(self):
        return ROWS // BATCH_SIZE

    def __getitem__(self, index):
        if index == 0:
            self._order = self._rng.permutation(ROWS)
        rows = self._order[index * BATCH_SIZE : (index + 1) * BATCH_SIZE]
        return {name: column[rows] for name, column in self._columns.items()}


def main(argv=None):
    """Print the table."""
    from jengine.data import ArrayDataset

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="where the ratios are written to")
    args = parser.parse_args(argv)
    case, rng = CASES[0], np.random.default_rng(0)
    columns = {
        "image": rng.standard_normal((ROWS, *case.shape), np.float32),
        "label": rng.integers(0, 10, ROWS).astype(np.int32),
    }
    with tempfile.TemporaryDirectory() as work_dir:
        loops = {"by hand": ByHand(case, os.path.join(work_dir, "hand"), 10, batches=ShuffledBatches(columns))}
        for size in CHUNKS:
            data = dict(dataset=ArrayDataset(columns), batch_size=BATCH_SIZE, drop_last=True)
            name = "single steps" if size == 1 else f"chunks of {size}"
            loops[name] = ByRunner(case, os.path.join(work_dir, name), 10, steps_per_call=size, dataloader=data)
        for loop in loops.values():
            loop.run(ROWS // BATCH_SIZE)
        times = compare({name: loop.run for name, loop in loops.items()}, ROWS // BATCH_SIZE, 3, args.rounds)
        for loop in loops.values():
            loop.close()
    hand = times.pop("by hand")
    rows = [[name, f"{hand.wall:.1f}", f"{own.wall:.1f}", own.ratio, own.cpu_ratio] for name, own in times.items()]
    print(table(["", "by hand", "us", "ratio", "CPU ratio"], rows))
    write_ratios(args.json, {f"run, {name}": own.ratio.median for name, own in times.items()})


if __name__ == "__main__":
    main()
