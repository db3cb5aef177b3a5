"""Measure AMP and the device idle time caused by logging, on an accelerator.

    python -m benchmarks.accelerator [--case vit] [--rounds 3] [--json FILE]

With the Runner: the time per iteration with AMP in float16 and bfloat16, compared with float32; and, from profiler
traces, the idle time of the device with a log line every 10 iterations and without log lines. `benchmarks.speed`
measures the cost of parameter averages. The script also runs on a CPU, where its numbers are meaningless.
"""

import argparse
import gzip
import itertools
import json
import pathlib
import tempfile

import jax

from benchmarks.by_runner import RunnerLoop
from benchmarks.cases import CASES
from benchmarks.report import table, write_ratios
from benchmarks.timing import compare

LOG_EVERY = 10


def busy_intervals(events):
    """Merge the events of compiled programs in a trace into the intervals in which the device is busy.

    Args:
      events: the `traceEvents` of a trace, times in microseconds.

    Returns:
      Disjoint `(begin, end)` pairs in order.
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
    """Return the idle time of the device between its first and last computation, in microseconds."""
    intervals = busy_intervals(events)
    return sum(after[0] - before[1] for before, after in itertools.pairwise(intervals))


def record_trace(run, iters):
    """Run `run(iters)` under the profiler and return the trace events."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run(iters)
        (file,) = pathlib.Path(directory).glob("**/*.trace.json.gz")
        return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def measure_idle(case, work_dir, iters):
    """Return the idle microseconds per iteration, without and with log lines, by name."""
    idle = {}
    for name, log_every in (("no log line", 0), (f"a log line every {LOG_EVERY}", LOG_EVERY)):
        loop = RunnerLoop(case, f"{work_dir}/idle_{log_every}", log_every=log_every)
        loop.run(2 * LOG_EVERY)
        idle[name] = idle_time(record_trace(loop.run, iters)) / iters
        loop.close()
    return idle


def measure_amp(case, work_dir, rounds):
    """Measure `Times` by dtype."""
    settings = {"float32": {}} | {
        dtype: dict(optim_wrapper=dict(type="AmpOptimWrapper", dtype=dtype)) for dtype in ("float16", "bfloat16")
    }
    loops = {name: RunnerLoop(case, f"{work_dir}/{name}", **overrides) for name, overrides in settings.items()}
    for loop in loops.values():
        loop.run(2 * case.block)
    times = compare({name: loop.run for name, loop in loops.items()}, case.block, case.turns, rounds)
    for loop in loops.values():
        loop.close()
    return times


def main(argv=None):
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[case.name for case in CASES], default="vit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iters", type=int, default=100, help="iterations per trace")
    parser.add_argument("--json", help="file to write the ratios to")
    args = parser.parse_args(argv)
    (case,) = [case for case in CASES if case.name == args.case]
    with tempfile.TemporaryDirectory() as work_dir:
        idle = measure_idle(case, work_dir, args.iters)
        times = measure_amp(case, work_dir, args.rounds)
    float32 = times["float32"].wall
    print(table([f"{case.name}, idle device", "us per iteration"], [[name, f"{us:,.1f}"] for name, us in idle.items()]))
    without_logging, with_logging = idle.values()
    print(f"a log line costs the device {(with_logging - without_logging) * LOG_EVERY:+,.1f} us")
    print()
    rows = [[name, f"{time.wall:,.1f}", f"{time.wall / float32:.3f}"] for name, time in times.items()]
    print(table([f"{case.name}, computing in", "us per iteration", "ratio"], rows))
    ratios = {f"{case.name}, AMP {name}": time.wall / float32 for name, time in times.items() if name != "float32"}
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
