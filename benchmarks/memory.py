"""Whether memory grows while training goes on, and how much the device holds, against the loop by hand.

    python -m benchmarks.memory [--iters 10000] [--json FILE]

The tiny MLP with a log line every 10 iterations. The growth is the slope of a line through what the process holds,
taken at twenty moments of the run after a warm-up; each loop has a process of its own. On an accelerator it is
the peak that the device itself counts that stands for its memory; on a CPU, the bytes of all arrays between two
steps.
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
from benchmarks.by_runner import CAN_FUSE, ByRunner
from benchmarks.cases import CASES
from benchmarks.report import table, write_ratios

LOOPS = {"by hand": (ByHand, {}), "Runner": (ByRunner, {}), "fused": (ByRunner, dict(fused=True))}
SAMPLES = 20
MEBI = 2**20


def resident():
    """What this process holds in memory, in bytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def slope(samples):
    """The growth from the first to the last of evenly spaced samples, of the line that fits them best."""
    return float(np.polyfit(np.arange(len(samples)), samples, 1)[0]) * (len(samples) - 1)


def device_memory():
    """Bytes on the device: the peak where it counts one, else what lives now."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats["peak_bytes_in_use"]
    return sum(array.nbytes for array in jax.live_arrays())


def measure(name, iters):
    """Growth and device memory of one loop, in bytes."""
    kind, settings = LOOPS[name]
    with tempfile.TemporaryDirectory() as work_dir:
        loop = kind(CASES[0], work_dir, log_every=10, **settings)
        loop.run(iters)  # the histories of logged numbers have their full length only then
        samples = []
        for _ in range(SAMPLES):
            loop.run(iters // SAMPLES)
            gc.collect()
            samples.append(resident())
        found = dict(growth=slope(samples), device=device_memory())
        loop.close()
    return found


def main(argv=None):
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iters", type=int, default=10_000)
    parser.add_argument("--json", help="where the ratios are written to")
    parser.add_argument("--measure", choices=LOOPS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(args.measure, args.iters)))
        return
    found = {}
    for name in LOOPS:
        if name != "fused" or CAN_FUSE:
            command = [sys.executable, "-m", "benchmarks.memory", "--measure", name, "--iters", str(args.iters)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[name] = json.loads(out.splitlines()[-1])
    hand = found["by hand"]["device"]
    rows = [
        [name, f"{own['growth'] / MEBI:+.2f}", f"{own['device'] / 1024:,.1f}", f"{own['device'] / hand:.3f}"]
        for name, own in found.items()
    ]
    print(table(["", f"MiB more over {args.iters:,} iterations", "KiB on the device", "over by hand"], rows))
    write_ratios(args.json, {f"memory, {k}": v["device"] / hand for k, v in found.items() if k != "by hand"})


if __name__ == "__main__":
    main()
