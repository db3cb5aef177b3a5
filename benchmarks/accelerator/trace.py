"""Idle time of a device, from a profiler trace."""

import gzip
import itertools
import json
import pathlib
import tempfile

import jax


def busy_intervals(events):
    """Merge the events of compiled programs in a trace into the intervals in which the device is
    busy.

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


def idle_share(events):
    """Return the share of the time in which the device is idle, in the second half of its
    computations.
    """
    intervals = busy_intervals(events)
    intervals = intervals[len(intervals) // 2 :]  # before, programs are compiled
    if len(intervals) < 2:
        return 0.0
    idle = sum(after[0] - before[1] for before, after in itertools.pairwise(intervals))
    return idle / (intervals[-1][1] - intervals[0][0])


def record_trace(run, iters):
    """Run `run(iters)` under the profiler and return the trace events.

    Calls of Python functions are not traced, because that takes the host longer than the calls
    themselves.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run(iters)
        (file,) = pathlib.Path(directory).glob("**/*.trace.json.gz")
        return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
