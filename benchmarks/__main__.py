"""Run the benchmarks, each in its own process, write RESULTS.md, and compare the ratios with those of ratios.json.

    python -m benchmarks [NAME ...] [--accept]

Exits with 1 if a ratio is worse than the accepted one by more than a tenth, in a second measurement too. `--accept`
makes this run's ratios the accepted ones, to be committed together with their cause.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks.report import has_accelerator, machine, table, versions
from benchmarks.results import best_of, judge, replace_section

HERE = pathlib.Path(__file__).parent
RESULTS, RATIOS = HERE / "RESULTS.md", HERE / "ratios.json"
INTRODUCTION = """# Results

Written by `make bench` and `make bench-peers`; docs/benchmarks.md says how they are to be read.
"""
BENCHMARKS = {
    "speed": ("An iteration, against the loop by hand", ["--rounds", "3"]),
    "run": ("A whole run of a tiny network, against the loop by hand", []),
    "host": ("The host's work, against bare calls of the step", []),
    "startup": ("Starting", ["--rounds", "5"]),
    "memory": ("Memory", []),
    "optim": ("Optimizer wrappers, against optax", []),
    "schedules": ("Schedules", []),
    "checkpoint": ("Checkpoints, against a copy to the host", ["--parameters", "20000000"]),
    "devices": ("What devices exchange", []),
    "accelerator": ("AMP, and the device's idle time", []),
}
ONLY_ON_ACCELERATORS = ("accelerator",)
WITHOUT_RATIOS = ("schedules", "devices")


def measure(name, options):
    """Run one benchmark; return its output and its ratios."""
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "ratios.json"
        options = options if name in WITHOUT_RATIOS else [*options, "--json", str(file)]
        command = [sys.executable, "-m", f"benchmarks.{name}", *options]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=HERE.parent).stdout
        return text, json.loads(file.read_text()) if file.exists() else {}


def write_section(title, text, packages):
    """Write the output of a benchmark to RESULTS.md, with date and machine."""
    document = RESULTS.read_text() if RESULTS.exists() else INTRODUCTION
    load = f"load average {os.getloadavg()[0]:.1f} at the end"  # much over one per core: the machine was shared
    body = f"{datetime.date.today()}, {machine()}, {load}; {versions(*packages)}.\n\n```\n{text.rstrip()}\n```"
    RESULTS.write_text(replace_section(document, title, body))


def main(argv=None):
    """Run, write and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--accept", action="store_true", help="keep the ratios of this run as the accepted ones")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(BENCHMARKS):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    accepted = json.loads(RATIOS.read_text()) if RATIOS.exists() else {}
    found = {}
    names = [name for name in BENCHMARKS if name not in ONLY_ON_ACCELERATORS or has_accelerator()]
    for name in args.names or names:
        title, options = BENCHMARKS[name]
        print(f"--- {name}: {title}", flush=True)
        text, ratios = measure(name, options)
        if not args.accept and any(change.worse for change in judge(accepted, ratios)):
            print("(some ratios are worse than the accepted ones; a second measurement)", flush=True)
            ratios = best_of(ratios, measure(name, options)[1])
        print(text, flush=True)
        write_section(title, text, ("jax", "flax", "optax", "orbax-checkpoint"))
        found.update(ratios)
    changes = judge(accepted, found)
    rows = [[change.name, f"{change.accepted or 0:.3f}", f"{change.found:.3f}", change.verdict] for change in changes]
    print(table(["ratio", "accepted", "found", ""], rows))
    if args.accept:
        RATIOS.write_text(json.dumps({**accepted, **found}, indent=1, sort_keys=True) + "\n")
        print(f"These are the accepted ratios now: commit {RATIOS.relative_to(HERE.parent)}.")
    elif worse := [change.name for change in changes if change.worse]:
        print(f"{len(worse)} of {len(changes)} ratios are worse by over a tenth: {'; '.join(worse)}")
        print("Mend that, or accept them with: python -m benchmarks --accept")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
