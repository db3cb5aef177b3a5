"""Kill training runs at random moments, saves included, and count those with the results of an
uninterrupted run.

    python -m benchmarks.crash [--runs 20] [--seed 0]

Each run has dropout, gradient accumulation, averaged parameters, a schedule and validations. It is
killed or terminated once and started again; its parameters, optimizer state, averages and logged
values are then compared bit for bit with those of an uninterrupted run. So are runs in chunks of
two steps, runs with an `out_dir`, runs that are killed while another one trains in a second work
dir with the same `out_dir`, and runs that are killed at each of their operations on the files of
checkpoints.
"""

import argparse
import concurrent.futures
import functools
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
    with tempfile.TemporaryDirectory() as directory:
        for label, signum, options in (
            ("SIGKILL", signal.SIGKILL, {}),
            ("SIGTERM", signal.SIGTERM, {}),
            ("SIGKILL, chunks of 2", signal.SIGKILL, {"steps_per_call": 2}),
            ("SIGKILL, out_dir", signal.SIGKILL, {"out_dir": f"{directory}/out"}),
        ):
            cases = range(args.seed, args.seed + args.runs)
            folder = pathlib.Path(directory) / label.replace(" ", "_").replace(",", "")
            report(
                label,
                [
                    functools.partial(kills.run, folder, 1, seed, signum, **options)
                    for seed in cases
                ],
            )
        seeds = range(args.seed, args.seed + args.runs, 2)
        report(
            "SIGKILL, two work dirs at once",
            [functools.partial(run_two, kills, directory, seed) for seed in seeds],
        )
        folder = pathlib.Path(directory) / "operations"
        count = kills.finish(folder / "count", 12)
        cases = [
            functools.partial(kills.run_killed_at, folder, number) for number in range(1, count + 1)
        ]
        report("SIGKILL at each file operation", cases)


def run_two(kills, directory, seed):
    """Kill two runs that train at the same time, in two work dirs and below one `out_dir`."""
    options = {"out_dir": f"{directory}/shared"}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        folder = pathlib.Path(directory) / "two"
        runs = [pool.submit(kills.run, folder / str(i), 1, seed + i, **options) for i in range(2)]
        return sum(run.result() for run in runs)


def report(label, cases):
    """Run the cases, and print how many were interrupted and how many have bit-identical
    results.
    """
    identical = interrupted = 0
    for number, case in enumerate(cases):
        try:
            interrupted += bool(case())
            identical += 1
        except AssertionError as error:
            print(f"{label}, case {number}: {error}")
    print(
        f"{label}: {identical} of {len(cases)} runs are bit-identical; {interrupted} were "
        "interrupted in time",
        flush=True,
    )


if __name__ == "__main__":
    main()
