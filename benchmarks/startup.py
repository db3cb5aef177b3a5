"""Measure a start: imports, the command line, and the time from a process's start to its first finished step.

    python -m benchmarks.startup [--rounds 10] [--json FILE]

Every figure is of fresh processes, in turns. The script by hand imports only its needs, and trains the small
CNN as the Runner does; with a warm cache both find their programs compiled. With accumulation it uses
`optax.MultiSteps`, and the first update is that of the fourth iteration.
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


class Spent(NamedTuple):
    """Hold the seconds of a process: wall time, and CPU time of all its threads."""

    wall: float
    cpu: float


def spend(command, **settings):
    """Run a command to its end, with the environment's variables changed by `settings`."""
    environment = {**os.environ, **settings}
    # if it is set, every start compiles the engine's source, unlike an installation by pip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    with open(os.devnull, "w") as nowhere:
        process = subprocess.Popen(command, stdout=nowhere, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return Spent(time.perf_counter() - start, usage.ru_utime + usage.ru_stime)


def medians(commands, rounds):
    """Return name -> median `Spent` of `commands`: name -> `run()`; the first call, which fills caches, is dropped."""
    found = {name: [] for name in commands}
    for i in range(rounds + 1):
        for name, run in commands.items():
            spent = run()
            if i > 0:
                found[name].append(spent)
    return {name: Spent(*map(statistics.median, zip(*times, strict=True))) for name, times in found.items()}


def first_step(name, cache, every=1):
    """Run a process that ends with its first update; `cache` None is a new and empty one each time."""
    command = [sys.executable, "-m", "benchmarks.first_step", FIRST_STEP[name], str(every)]
    settings = dict(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1")
    with tempfile.TemporaryDirectory() as empty:  # for the work dir too
        return spend(command, JAX_COMPILATION_CACHE_DIR=cache or empty, TMPDIR=empty, **settings)


def main(argv=None):
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="where the ratios are written to")
    args = parser.parse_args(argv)
    commands = {name: lambda code=code: spend([sys.executable, "-c", code]) for name, code in IMPORTS.items()}
    commands["jengine --help"] = lambda: spend([os.path.join(os.path.dirname(sys.executable), "jengine"), "--help"])
    imports = medians(commands, args.rounds)
    rows = [[name, f"{own.wall * 1e3:.0f}", f"{own.cpu * 1e3:.0f}"] for name, own in imports.items()]
    print(table(["milliseconds", "wall", "CPU"], rows))
    ratios = {}
    for name, plain in (("import jax, jengine", "import jax"), ("the same and Runner", "import jax, flax, optax")):
        more = imports[name].cpu - imports[plain].cpu
        print(f"{name!r} over {plain!r}: {more * 1e3:+.0f} ms of CPU time")
        ratios[f"startup, {name}"] = imports[name].cpu / imports[plain].cpu
    print()
    rows = []
    with tempfile.TemporaryDirectory() as warm:
        few = max(args.rounds // 3, 1)
        kinds = [
            ("warm cache", warm, args.rounds, 1),
            ("cold cache", None, few, 1),
            ("accumulation, cold cache", None, few, 4),
        ]
        for kind, cache, rounds, every in kinds:
            commands = {
                name: lambda name=name, cache=cache, every=every: first_step(name, cache, every) for name in FIRST_STEP
            }
            found = medians(commands, rounds)
            hand, own = found["by hand"], found["Runner"]
            ratios[f"startup, first step, {kind}"] = own.cpu / hand.cpu
            rows.append([kind, f"{hand.wall:.2f}", f"{own.wall:.2f}", f"{own.wall / hand.wall:.2f}",
                         f"{hand.cpu:.2f}", f"{own.cpu:.2f}", f"{own.cpu / hand.cpu:.2f}"])  # fmt: skip
    columns = ["to the first update, seconds", "by hand", "Runner", "ratio", "by hand, CPU", "Runner, CPU", "ratio"]
    print(table(columns, rows))
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
