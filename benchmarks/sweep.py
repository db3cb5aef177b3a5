"""Measure what a sweep adds to its runs: 20 short runs by `jengine sweep`, and by `jengine train`
one after the other.

    python -m benchmarks.sweep [--runs 20] [--rounds 3] [--json FILE]

Both train the small CNN with 20 seeds for 20 iterations with a validation and a checkpoint, each
run in a process of its own, and take turns. CPU times are those of all processes; on a busy machine
they say more than wall times.
"""

import argparse
import os
import statistics
import sys
import tempfile

from benchmarks.report import table, write_ratios
from benchmarks.startup import Seconds, measure

CONFIG = "configs/digits_cnn.py"
SHORT = [
    "--config.train_cfg={'by_epoch': False, 'max_iters': 20, 'val_interval': 20, '_delete_': True}",
    "--config.param_scheduler=[]",
    "--config.default_hooks.checkpoint={'by_epoch': False, 'interval': 20}",
    "--config.visualizer=None",
]
JENGINE = [sys.executable, "-m", "jengine"]


def train_alone(runs, cache):
    """Train with each seed in a process, one after the other."""
    with tempfile.TemporaryDirectory() as directory:
        seconds = []
        for seed in range(runs):
            own = [
                f"--config.randomness.seed={seed}",
                "--work-dir",
                os.path.join(directory, str(seed)),
                "--resume",
            ]
            seconds.append(
                measure([*JENGINE, "train", CONFIG, *SHORT, *own], JAX_COMPILATION_CACHE_DIR=cache)
            )
    return Seconds(*map(sum, zip(*seconds, strict=True)))


def train_swept(runs, cache):
    """Train with each seed by a sweep."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--seeds", str(runs), "--work-dir", os.path.join(directory, "sweep")]
        return measure(
            [*JENGINE, "sweep", CONFIG, *SHORT, *options], JAX_COMPILATION_CACHE_DIR=cache
        )


def main(argv=None):
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file to write the ratios to")
    args = parser.parse_args(argv)
    times = {train_alone: [], train_swept: []}
    with tempfile.TemporaryDirectory() as cache:
        train_alone(1, cache)  # fills the cache
        for _ in range(args.rounds):
            for run, measured in times.items():
                measured.append(run(args.runs, cache))
                print(run.__name__, measured[-1], flush=True)
    alone, swept = (
        Seconds(*map(statistics.median, zip(*found, strict=True))) for found in times.values()
    )
    rows = [
        ["jengine train", f"{alone.wall:.1f}", f"{alone.cpu:.1f}"],
        ["jengine sweep", f"{swept.wall:.1f}", f"{swept.cpu:.1f}"],
    ]
    rows.append(["ratio", f"{swept.wall / alone.wall:.3f}", f"{swept.cpu / alone.cpu:.3f}"])
    print(table([f"seconds of {args.runs} runs", "wall", "CPU"], rows))
    write_ratios(args.json, {"sweep, 20 runs": swept.cpu / alone.cpu})


if __name__ == "__main__":
    main()
