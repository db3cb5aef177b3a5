"""Kill training runs at random moments, saves included, and count those that end as if nothing had happened.

    python -m benchmarks.crash [--runs 20] [--seed 0]

Every run has dropout, gradient accumulation, an averaged model, a schedule and validations; it is killed once (or
terminated), started again, and its parameters, optimizer state, averages and logged numbers are compared, bit for
bit, with those of an undisturbed run.
"""

import argparse
import importlib.util
import pathlib
import signal
import tempfile

KILLS = pathlib.Path(__file__).parent.parent / "tests" / "crash" / "kills.py"


def main():
    """Print how many of the runs ended with the same bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("kills", KILLS)
    kills = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kills)
    for signum in (signal.SIGKILL, signal.SIGTERM):
        same = in_time = 0
        with tempfile.TemporaryDirectory() as directory:
            for seed in range(args.seed, args.seed + args.runs):
                try:
                    in_time += kills.run(directory, kills=1, seed=seed, signum=signum)
                    same += 1
                except AssertionError as error:
                    print(f"seed {seed}: {error}")
        print(
            f"{signum.name}: {same} of {args.runs} runs ended with the same bits; {in_time} were hit before their end"
        )


if __name__ == "__main__":
    main()
