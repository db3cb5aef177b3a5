"""Measure memory growth during training and device memory, compared with the hand-written loop.

    python -m benchmarks.memory [--iters 10000] [--json FILE]

Each loop runs in its own process, with a log line every 10 iterations. The growth, measured for the
tiny MLP only, is the slope of a line fitted to twenty samples of the resident memory after a
warm-up. The device memory is the peak that an accelerator reports; on a CPU, the size of all live
arrays between two steps plus the temporary memory of the largest program.
"""

import argparse
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np

from benchmarks.by_hand import HandWrittenLoop
from benchmarks.by_runner import RunnerLoop
from benchmarks.cases import CASES
from benchmarks.report import table, write_ratios

LOOPS = {
    "by hand": (HandWrittenLoop, {}),
    "Runner": (RunnerLoop, {}),
    "chunks of 10": (RunnerLoop, dict(steps_per_call=10)),
}
SAMPLES = 20
MEBI = 2**20


def resident_memory():
    """Return the resident memory of this process in bytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def fit_growth(samples):
    """Return the growth from the first to the last of evenly spaced samples, on the line fitted
    to them.
    """
    return float(np.polyfit(np.arange(len(samples)), samples, 1)[0]) * (len(samples) - 1)


def device_memory():
    """Return the peak device memory in bytes: as reported, or live arrays plus temporary memory
    of programs.
    """
    device = jax.devices()[0]
    if stats := device.memory_stats():
        return stats["peak_bytes_in_use"]
    programs = [program.get_compiled_memory_stats() for program in device.client.live_executables()]
    live = sum(array.nbytes for array in jax.live_arrays())
    return live + max(program.temp_size_in_bytes for program in programs)


def measure(name, case, iters):
    """Measure the growth (None if `iters` is 0) and the device memory of one loop, in bytes."""
    kind, settings = LOOPS[name]
    with tempfile.TemporaryDirectory() as work_dir:
        loop = kind(case, work_dir, log_every=10, **settings)
        loop.run(iters or 2 * case.block)  # until the histories of scalars have their full length
        samples = []
        for _ in range(SAMPLES if iters else 0):
            loop.run(iters // SAMPLES)
            gc.collect()
            samples.append(resident_memory())
        result = dict(growth=fit_growth(samples) if iters else None, device=device_memory())
        loop.close()
    return result


def measure_in_process(name, case, iters):
    """Run `measure` in a new process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory",
        "--measure",
        name,
        "--case",
        case.name,
        "--iters",
        str(iters),
    ]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main(argv=None):
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iters", type=int, default=10_000)
    parser.add_argument("--json", help="file to write the ratios to")
    parser.add_argument("--measure", choices=LOOPS, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        (case,) = [case for case in CASES if case.name == args.case]
        print(json.dumps(measure(args.measure, case, args.iters)))
        return
    rows = []
    ratios = {}
    for case in CASES:
        iters = args.iters if case is CASES[0] else 0
        results = {name: measure_in_process(name, case, iters) for name in LOOPS}
        reference = results["by hand"]["device"]
        for name, result in results.items():
            growth = f"{result['growth'] / MEBI:+.2f}" if iters else ""
            rows.append(
                [
                    case.name,
                    name,
                    growth,
                    f"{result['device'] / 1024:,.1f}",
                    f"{result['device'] / reference:.3f}",
                ]
            )
            if name != "by hand":
                ratios[f"memory, {case.name}, {name}"] = result["device"] / reference
    columns = [
        "network",
        "",
        f"MiB growth in {args.iters:,} iterations",
        "KiB on the device",
        "ratio to by hand",
    ]
    print(table(columns, rows))
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
