"""Compare the time per step, without and with log lines, and the memory with loops by hand.

python -m benchmarks.accelerator.engine [--tiny]
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile

import jax

from benchmarks.accelerator.rows import record, record_close
from benchmarks.by_hand import HandWrittenLoop
from benchmarks.by_runner import RunnerLoop
from benchmarks.cases import CASES
from benchmarks.speed import measure

BATCH_SIZES = {
    "mlp": 32,
    "cnn": 1024,
    "vit": 256,
}  # an accelerator needs more examples than a CPU to be busy


def sized(case, tiny):
    """Return a case with the batch size for an accelerator, or with short blocks."""
    if tiny:
        return dataclasses.replace(case, block=4, turns=1, chunks=case.chunks[:1], batch_size=4)
    return dataclasses.replace(
        case, batch_size=BATCH_SIZES[case.name], block=min(case.block, 200), turns=5
    )


def check_speed(directory, case, rounds, variant="plain"):
    """Record the ratios of steps and chunks to the loop by hand, interleaved in this process."""
    label = case.name if variant == "plain" else f"{case.name}, {variant}"
    times = measure(case, variant, f"{directory}/{case.name}_{variant}", rounds)
    hand = times.pop("by hand")
    record(f"{label}, by hand: us per step", hand.wall)
    for name, time in times.items():
        record(f"{label}, {name}: us per step", time.wall)
        record(f"{label}, {name} / by hand", str(time.ratio))


def print_peak(case, kind, iters):
    """Train in this process, and print the peak of the device's memory in bytes, or 0 if it is
    unknown.
    """
    with tempfile.TemporaryDirectory() as directory:
        loop = (HandWrittenLoop if kind == "hand" else RunnerLoop)(case, directory)
        loop.run(iters)
        loop.close()
    print("peak", (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def check_memory(case, tiny):
    """Record the ratio of the peaks of two processes."""
    peaks = {}
    for kind in ("hand", "runner"):
        command = [
            sys.executable,
            "-m",
            "benchmarks.accelerator.engine",
            "--peak",
            kind,
            "--case",
            case.name,
        ]
        command += ["--tiny"] if tiny else []
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith("peak ")]
        if not lines:
            record(f"{case.name}: peak memory, {kind}", done.stderr[-300:], "a number", False)
            return
        peaks[kind] = int(lines[-1].split()[1])
        record(f"{case.name}: peak memory, {kind}, MiB", peaks[kind] / 2**20)
    if peaks["hand"]:
        record_close(f"{case.name}: peak memory / by hand", peaks["runner"] / peaks["hand"], 1.1)


def main():
    """Run all measurements, or print the peak of one loop."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--peak", choices=("hand", "runner"), help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = {case.name: sized(case, args.tiny) for case in CASES}
    if args.peak:
        print_peak(cases[args.case], args.peak, 8)
        return
    with tempfile.TemporaryDirectory() as directory:
        # Loops and processes that compile the same program compile it once.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{directory}/cache"
        jax.config.update("jax_compilation_cache_dir", f"{directory}/cache")
        rounds = 1 if args.tiny else 2
        for name in ("mlp", "cnn", "vit"):
            check_speed(directory, cases[name], rounds)
        check_memory(cases["cnn"], args.tiny)
        for name in ("mlp", "cnn"):  # last, since logs differ little between devices
            check_speed(directory, cases[name], rounds, "log every 10")


if __name__ == "__main__":
    main()
