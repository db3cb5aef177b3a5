"""Run the benchmarks, each in its own process, and compare the ratios with ratios.json.

    python -m benchmarks [NAME ...] [--accept]

The tables are written to .bench/RESULTS.md. The exit code is 1 if a ratio is more than 10 % worse
than the accepted one in two measurements. `--accept` stores the tables and ratios of this run as
the accepted ones, in this directory; commit them together with the change that caused them.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks.report import machine, table, versions
from benchmarks.results import compare_ratios, lower_of, replace_section

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
RATIOS = HERE / "ratios.json"
MEASURED = HERE.parent / ".bench" / "RESULTS.md"
INTRODUCTION = """# Results

Written by `make bench` and `make bench-peers`, with `ARGS=--accept`; docs/benchmarks.md explains \
the numbers.
"""
BENCHMARKS = {
    "speed": ("Time per iteration, compared with a hand-written loop", ["--rounds", "3"]),
    "run": ("Whole run of a tiny network, compared with a hand-written loop", []),
    "host": ("Host overhead, compared with bare calls of the step", []),
    "startup": ("Startup", ["--rounds", "5"]),
    "images": ("Images decoded from files, compared with grain, PyTorch and tf.data", []),
    "memory": ("Memory", []),
    "optim": ("Optimizer wrappers, compared with optax", []),
    "schedules": ("Schedules", []),
    "checkpoint": ("Checkpoints, compared with a copy to the host", ["--parameters", "20000000"]),
    "devices": ("Communication between devices", []),
    "requests": ("Requests of many processes to the coordination service", []),
}
WITHOUT_RATIOS = ("schedules", "devices", "requests")


def measure(name, options):
    """Run one benchmark and return its output and its ratios."""
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "ratios.json"
        options = options if name in WITHOUT_RATIOS else [*options, "--json", str(file)]
        command = [sys.executable, "-m", f"benchmarks.{name}", *options]
        text = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, cwd=HERE.parent
        ).stdout
        return text, json.loads(file.read_text()) if file.exists() else {}


def write_section(title, text, packages, accept):
    """Write the output of a benchmark to the accepted or the measured results, with the date and
    the machine.
    """
    path = RESULTS if accept else MEASURED
    document = path.read_text() if path.exists() else INTRODUCTION
    load = (
        # clearly above one per core: other processes were running
        f"load average {os.getloadavg()[0]:.1f} at the end"
    )
    body = (
        f"{datetime.date.today()}, {machine()}, {load}; "
        f"{versions(*packages)}.\n\n```\n{text.rstrip()}\n```"
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(replace_section(document, title, body))


def main(argv=None):
    """Run the benchmarks, write and compare the results, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; all by default"
    )
    parser.add_argument(
        "--accept", action="store_true", help="store the ratios of this run as the accepted ones"
    )
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(BENCHMARKS):
        parser.error(
            f"unknown benchmarks: {', '.join(sorted(unknown))}; expected any of "
            f"{', '.join(BENCHMARKS)}"
        )
    accepted = json.loads(RATIOS.read_text()) if RATIOS.exists() else {}
    all_ratios = {}
    for name in args.names or BENCHMARKS:
        title, options = BENCHMARKS[name]
        print(f"--- {name}: {title}", flush=True)
        text, ratios = measure(name, options)
        if not args.accept and any(change.worse for change in compare_ratios(accepted, ratios)):
            print("(some ratios are worse than the accepted ones; measuring again)", flush=True)
            ratios = lower_of(ratios, measure(name, options)[1])
        print(text, flush=True)
        write_section(title, text, ("jax", "flax", "optax", "orbax-checkpoint"), args.accept)
        all_ratios.update(ratios)
    changes = compare_ratios(accepted, all_ratios)
    rows = [
        [change.name, f"{change.accepted or 0:.3f}", f"{change.measured:.3f}", change.verdict]
        for change in changes
    ]
    print(table(["ratio", "accepted", "measured", ""], rows))
    if args.accept:
        RATIOS.write_text(json.dumps({**accepted, **all_ratios}, indent=1, sort_keys=True) + "\n")
        print(f"The accepted ratios were updated: commit {RATIOS.relative_to(HERE.parent)}.")
    elif worse := [change.name for change in changes if change.worse]:
        print(f"{len(worse)} of {len(changes)} ratios are more than 10 % worse: {'; '.join(worse)}")
        print("Fix the cause, or accept them with: python -m benchmarks --accept")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
