"""Measure the growth of memory during training, and the device memory, against the loop by hand.

    python -m benchmarks.memory [--iters 10000] [--json FILE]

With a log line every 10 iterations; each loop has a process of its own. The growth, of the tiny MLP alone, is the slope
of a line through the resident memory at twenty moments of the run after a warm-up. The device memory is the peak that
an accelerator reports; on a CPU, the bytes of all arrays between two steps
and those that the largest program uses in addition while it runs.
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

from benchmarks.by_hand import ByHand
from benchmarks.by_runner import ByRunner
from benchmarks.cases import CASES
from benchmarks.report import table, write_ratios

LOOPS = {"by hand": (ByHand, {}), "Runner": (ByRunner, {}), "chunks of 10": (ByRunner, dict(steps_per_call=10))}
SAMPLES = 20
MEBI = 2**20


def resident():
    """Return the memory of this process, in bytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def slope(samples):
    """Return the growth from the first to the last of evenly spaced samples, of the line that fits them best."""
    return float(np.polyfit(np.arange(len(samples)), samples, 1)[0]) * (len(samples) - 1)


def device_memory():
    """Return the peak of bytes on the device: as it reports it, or live arrays plus the programs' temporary memory."""
    device = jax.devices()[0]
    if stats := device.memory_stats():
        return stats["peak_bytes_in_use"]
    programs = [program.get_compiled_memory_stats() for program in device.client.live_executables()]
    between = sum(array.nbytes for array in jax.live_arrays())
    return between + max(program.temp_size_in_bytes for program in programs)


def measure(name, case, iters):
    """Return growth, unless `iters` is 0, and device memory of one loop, in bytes."""
    kind, settings = LOOPS[name]
    with tempfile.TemporaryDirectory() as work_dir:
        loop = kind(case, work_dir, log_every=10, **settings)
        loop.run(iters or 2 * case.block)  # only then the histories of logged numbers have their full length
        samples = []
        for _ in range(SAMPLES if iters else 0):
            loop.run(iters // SAMPLES)
            gc.collect()
            samples.append(resident())
        found = dict(growth=slope(samples) if iters else None, device=device_memory())
        loop.close()
    return found


def measure_apart(name, case, iters):
    """Run `measure` in its own process."""
    command = [sys.executable, "-m", "benchmarks.memory", "--measure", name, "--case", case.name, "--iters", str(iters)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main(argv=None):
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iters", type=int, default=10_000)
    parser.add_argument("--json", help="where the ratios are written to")
    parser.add_argument("--measure", choices=LOOPS, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        (case,) = [case for case in CASES if case.name == args.case]
        print(json.dumps(measure(args.measure, case, args.iters)))
        return
    rows, ratios = [], {}
    for case in CASES:
        iters = args.iters if case is CASES[0] else 0
        found = {name: measure_apart(name, case, iters) for name in LOOPS}
        hand = found["by hand"]["device"]
        for name, own in found.items():
            growth = f"{own['growth'] / MEBI:+.2f}" if iters else ""
            rows.append([case.name, name, growth, f"{own['device'] / 1024:,.1f}", f"{own['device'] / hand:.3f}"])
            if name != "by hand":
                ratios[f"memory, {case.name}, {name}"] = own["device"] / hand
    columns = ["network", "", f"MiB more over {args.iters:,} iterations", "KiB on the device", "over by hand"]
    print(table(columns, rows))
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
