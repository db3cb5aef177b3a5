"""Measure the time per iteration with the Runner, compared with the hand-written loop.

    python -m benchmarks.speed [--case mlp] [--variant plain] [--rounds 5] [--json FILE]

Three networks, each plain, with a log line every 10 iterations, with an average of the parameters,
and with a checkpoint every 100 iterations. Times are in microseconds per iteration; ratios to the
hand-written loop are measured in the same process in turns, with 95 % confidence intervals. "CPU
ratio" compares the CPU time of the whole process, "main" is the additional CPU time of the main
thread.
"""

import argparse
import os
import tempfile

from benchmarks.by_hand import HandWrittenLoop
from benchmarks.by_runner import RunnerLoop
from benchmarks.cases import CASES
from benchmarks.report import table, write_ratios
from benchmarks.timing import compare

VARIANTS = {
    "plain": {},
    "log every 10": dict(log_every=10),
    "EMA": dict(ema=True),
    "save every 100": dict(save_every=100),
}
WARM_UP = 2  # blocks that are not measured, because the first calls compile


def measure(case, variant, work_dir, rounds):
    """Measure `Times` by loop: written by hand, with the Runner, and with the Runner in chunks."""
    settings = VARIANTS[variant]
    block = max(case.block, settings.get("save_every", 0))
    loops = {"by hand": HandWrittenLoop(case, os.path.join(work_dir, "hand"), **settings)}
    loops["Runner"] = RunnerLoop(case, os.path.join(work_dir, "runner"), **settings)
    for size in case.chunks:
        loops[f"chunks of {size}"] = RunnerLoop(
            case, os.path.join(work_dir, str(size)), **settings, steps_per_call=size
        )
    try:
        for loop in loops.values():
            loop.run(WARM_UP * case.block)
        # blocks with a checkpoint may be ten times longer, so measure fewer of them
        turns = max(1, case.turns * case.block // block)
        return compare({name: loop.run for name, loop in loops.items()}, block, turns, rounds)
    finally:
        for loop in loops.values():
            loop.close()


def main(argv=None):
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this network")
    parser.add_argument("--variant", choices=VARIANTS, help="only this variant")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file to write the ratios to")
    args = parser.parse_args(argv)
    rows = []
    ratios = {}
    for case in CASES:
        for variant in VARIANTS:
            if args.case not in (None, case.name) or args.variant not in (None, variant):
                continue
            with tempfile.TemporaryDirectory() as work_dir:
                times = measure(case, variant, work_dir, args.rounds)
            hand = times.pop("by hand")
            for name, time in times.items():
                row = [case.name, variant, f"{hand.wall:,.1f}", name, f"{time.wall:,.1f}"]
                rows.append([*row, time.ratio, time.cpu_ratio, f"{time.thread_overhead:+,.1f}"])
                ratios[f"{case.name}, {variant}, {name}"] = time.ratio.median
    print(table(["network", "variant", "by hand", "", "us", "ratio", "CPU ratio", "main"], rows))
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
