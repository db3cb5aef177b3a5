"""Measure startup: imports, the command line, and the time from the start of a process to its first
finished step.

    python -m benchmarks.startup [--rounds 10] [--json FILE]

Each measurement runs in new processes; the programs take turns. The script by hand imports only the
required modules and trains the small CNN in the same way as the Runner. With a warm cache, the
programs of both are already compiled. With accumulation the script uses `optax.MultiSteps`, and the
first update happens in the fourth iteration.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from benchmarks.report import table, write_ratios

IMPORTS = {
    "import jax": "import jax",
    "import jax, jengine": "import jax, jengine",
    "import jax, flax, optax": "import jax, optax, flax.linen",
    "the same and Runner": "import jax, optax, flax.linen; from jengine import Runner",
}
FIRST_STEP = {"by hand": "by_hand", "Runner": "by_runner"}


class Seconds(NamedTuple):
    """Hold the wall time of a process and the CPU time of all its threads, in seconds."""

    wall: float
    cpu: float


def measure(command, **variables):
    """Run a command with additional environment variables; return its `Seconds`."""
    environment = {**os.environ, **variables}
    # if set, each process would compile the source of the engine, unlike with an installation by
    # pip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    with open(os.devnull, "w") as devnull:
        process = subprocess.Popen(command, stdout=devnull, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {process.returncode}")
    return Seconds(time.perf_counter() - start, usage.ru_utime + usage.ru_stime)


def compute_medians(commands, rounds):
    """Return the median `Seconds` of each command by name; the first call, which fills caches,
    does not count.
    """
    measurements = {name: [] for name in commands}
    for i in range(rounds + 1):
        for name, run in commands.items():
            seconds = run()
            if i > 0:
                measurements[name].append(seconds)
    return {
        name: Seconds(*map(statistics.median, zip(*times, strict=True)))
        for name, times in measurements.items()
    }


def measure_first_step(name, cache, every=1):
    """Measure a process that exits after its first update; with `cache` None, each has a new and
    empty cache.
    """
    command = [sys.executable, "-m", "benchmarks.first_step", FIRST_STEP[name], str(every)]
    variables = dict(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1")
    with tempfile.TemporaryDirectory() as empty:  # for the work dir too
        return measure(command, JAX_COMPILATION_CACHE_DIR=cache or empty, TMPDIR=empty, **variables)


def main(argv=None):
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="file to write the ratios to")
    args = parser.parse_args(argv)
    commands = {
        name: lambda code=code: measure([sys.executable, "-c", code])
        for name, code in IMPORTS.items()
    }
    commands["jengine --help"] = lambda: measure(
        [os.path.join(os.path.dirname(sys.executable), "jengine"), "--help"]
    )
    imports = compute_medians(commands, args.rounds)
    rows = [
        [name, f"{seconds.wall * 1e3:.0f}", f"{seconds.cpu * 1e3:.0f}"]
        for name, seconds in imports.items()
    ]
    print(table(["milliseconds", "wall", "CPU"], rows))
    ratios = {}
    for name, plain in (
        ("import jax, jengine", "import jax"),
        ("the same and Runner", "import jax, flax, optax"),
    ):
        extra = imports[name].cpu - imports[plain].cpu
        print(f"{name!r} over {plain!r}: {extra * 1e3:+.0f} ms of CPU time")
        ratios[f"startup, {name}"] = imports[name].cpu / imports[plain].cpu
    print()
    rows = []
    with tempfile.TemporaryDirectory() as warm:
        cold_rounds = max(args.rounds // 3, 1)
        kinds = [
            ("warm cache", warm, args.rounds, 1),
            ("cold cache", None, cold_rounds, 1),
            ("accumulation, cold cache", None, cold_rounds, 4),
        ]
        for kind, cache, rounds, every in kinds:
            commands = {
                name: lambda name=name, cache=cache, every=every: measure_first_step(
                    name, cache, every
                )
                for name in FIRST_STEP
            }
            medians = compute_medians(commands, rounds)
            hand = medians["by hand"]
            runner = medians["Runner"]
            ratios[f"startup, first step, {kind}"] = runner.cpu / hand.cpu
            rows.append(
                [
                    kind,
                    f"{hand.wall:.2f}",
                    f"{runner.wall:.2f}",
                    f"{runner.wall / hand.wall:.2f}",
                    f"{hand.cpu:.2f}",
                    f"{runner.cpu:.2f}",
                    f"{runner.cpu / hand.cpu:.2f}",
                ]
            )
    columns = [
        "seconds to the first update",
        "by hand",
        "Runner",
        "ratio",
        "by hand, CPU",
        "Runner, CPU",
        "ratio",
    ]
    print(table(columns, rows))
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
