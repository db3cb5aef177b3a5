"""Kill training runs at random moments, saves included, and count those with the results of an uninterrupted run.

    python -m benchmarks.crash [--runs 20] [--seed 0]

Each run has dropout, gradient accumulation, averaged parameters, a schedule and validations. It is killed or terminated
once and started again; its parameters, optimizer state, averages and logged values are then compared bit for bit with
those of an uninterrupted run.
"""

import argparse
import importlib.util
import pathlib
import signal
import tempfile

KILLS = pathlib.Path(__file__).parent.parent / "tests" / "crash" / "kills.py"


def main():
    """Print how many runs have bit-identical results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("kills", KILLS)
    kills = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kills)
    for signum in (signal.SIGKILL, signal.SIGTERM):
        identical = interrupted = 0
        with tempfile.TemporaryDirectory() as directory:
            for seed in range(args.seed, args.seed + args.runs):
                try:
                    interrupted += kills.run(directory, kills=1, seed=seed, signum=signum)
                    identical += 1
                except AssertionError as error:
                    print(f"seed {seed}: {error}")
        print(
            f"{signum.name}: {identical} of {args.runs} runs are bit-identical; {interrupted} were interrupted in time"
        )


if __name__ == "__main__":
    main()
