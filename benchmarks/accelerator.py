"""Measure compute dtypes on an accelerator, and its idle time while the host logs.

    python -m benchmarks.accelerator [--case vit] [--rounds 3] [--json FILE]

Through the Runner: an iteration under AMP in float16 and bfloat16 against float32; and, from traces of the profiler,
the idle time of the device, with a log line every 10 iterations and without any. The cost of an average of the
parameters is in the table of `benchmarks.speed`. It runs on a CPU too, but without meaning for accelerators.
"""

import argparse
import gzip
import itertools
import json
import pathlib
import tempfile

import jax

from benchmarks.by_runner import ByRunner
from benchmarks.cases import CASES
from benchmarks.report import table, write_ratios
from benchmarks.timing import compare

LOG_EVERY = 10


def busy_intervals(events):
    """Return the times at which the device computes: the union of the events of compiled programs in a trace.

    Args:
      events: the `traceEvents` of a trace, times in microseconds.

    Returns:
      `(begin, end)` pairs in order, disjoint.
    """
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and "hlo_module" in event.get("args", {})
    )
    merged = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def idle_time(events):
    """Return the idle time of the device between its first and its last computation, in microseconds."""
    busy = busy_intervals(events)
    return sum(after[0] - before[1] for before, after in itertools.pairwise(busy))


def trace(run, iters):
    """Return the events of a trace of `run(iters)`."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run(iters)
        (file,) = pathlib.Path(directory).glob("**/*.trace.json.gz")
        return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def measure_idle(case, work_dir, iters):
    """Return the idle microseconds of an iteration, without log lines and with them."""
    found = {}
    for name, log_every in (("no log line", 0), (f"a log line every {LOG_EVERY}", LOG_EVERY)):
        loop = ByRunner(case, f"{work_dir}/idle_{log_every}", log_every=log_every)
        loop.run(2 * LOG_EVERY)
        found[name] = idle_time(trace(loop.run, iters)) / iters
        loop.close()
    return found


def measure_amp(case, work_dir, rounds):
    """Return `Times` by name of the dtype."""
    wrappers = {"float32": {}} | {
        dtype: dict(optim_wrapper=dict(type="AmpOptimWrapper", dtype=dtype)) for dtype in ("float16", "bfloat16")
    }
    loops = {name: ByRunner(case, f"{work_dir}/{name}", **settings) for name, settings in wrappers.items()}
    for loop in loops.values():
        loop.run(2 * case.block)
    times = compare({name: loop.run for name, loop in loops.items()}, case.block, case.turns, rounds)
    for loop in loops.values():
        loop.close()
    return times


def main(argv=None):
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[case.name for case in CASES], default="vit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iters", type=int, default=100, help="iterations in a trace")
    parser.add_argument("--json", help="where the ratios are written to")
    args = parser.parse_args(argv)
    (case,) = [case for case in CASES if case.name == args.case]
    with tempfile.TemporaryDirectory() as work_dir:
        idle = measure_idle(case, work_dir, args.iters)
        times = measure_amp(case, work_dir, args.rounds)
    full = times["float32"].wall
    print(table([f"{case.name}, idle device", "us an iteration"], [[name, f"{us:,.1f}"] for name, us in idle.items()]))
    silent, logging = idle.values()
    print(f"a log line costs the device {(logging - silent) * LOG_EVERY:+,.1f} us")
    print()
    rows = [[name, f"{own.wall:,.1f}", f"{own.wall / full:.3f}"] for name, own in times.items()]
    print(table([f"{case.name}, computing in", "us an iteration", "ratio"], rows))
    ratios = {f"{case.name}, AMP {name}": own.wall / full for name, own in times.items() if name != "float32"}
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
