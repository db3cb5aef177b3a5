"""Measure the Runner's host work: an iteration with 15 hooks against a bare call of the compiled step.

    python -m benchmarks.host [--rounds 9] [--json FILE]

The tiny MLP, a log line every 10 iterations. The bare call is that of the step written by hand, with nothing around it.
The time is the CPU time of the main thread, so that it does not count other load on the machine; the wall time
is next to it.
"""

import argparse
import itertools
import tempfile

import jax

from benchmarks.by_hand import ByHand
from benchmarks.by_runner import ByRunner
from benchmarks.cases import CASES
from benchmarks.report import table, write_ratios
from benchmarks.timing import compare

HOOKS = [
    dict(type="CheckInvalidLossHook", interval=50),
    dict(type="EarlyStoppingHook", monitor="accuracy/top1"),
    dict(type="EmptyCacheHook", after_epoch=False),  # it would collect garbage once a block
    dict(type="MemoryProfilerHook", interval=500),
    dict(type="ProfilerHook", by_epoch=False, schedule=dict(wait=10**9, warmup=0, active=1)),
    dict(type="SetEpochInfoHook"),
    dict(type="SyncBuffersHook"),
    dict(type="CheckInvalidLossHook", interval=100),
    dict(type="CheckpointHook", by_epoch=False, interval=10**9, save_last=False),
]
SETTINGS = dict(log_every=10, save_every=10**9)


def bare_calls(hand):
    """Call the step and nothing else."""
    batches = itertools.cycle(hand.batches)

    def run(iters):
        step, state = hand.step, hand.state
        for batch in itertools.islice(batches, iters):
            state, _ = step(state, batch)
        hand.state = jax.block_until_ready(state)

    return run


def main(argv=None):
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="where the ratios are written to")
    args = parser.parse_args(argv)
    case = CASES[0]
    with tempfile.TemporaryDirectory() as work_dir:
        loops = {"Runner": ByRunner(case, f"{work_dir}/runner", **SETTINGS, hooks=HOOKS)}
        loops["Runner, chunks of 10"] = ByRunner(case, f"{work_dir}/10", **SETTINGS, hooks=HOOKS, steps_per_call=10)
        hooks = len(loops["Runner"].runner.hooks)
        hand = ByHand(case, f"{work_dir}/hand")
        runs = {"bare calls": bare_calls(hand), **{name: loop.run for name, loop in loops.items()}}
        for run in runs.values():
            run(2 * case.block)
        times = compare(runs, case.block, case.turns, args.rounds)
        for loop in (hand, *loops.values()):
            loop.close()
    bare = times["bare calls"]
    rows, ratios = [], {}
    for name, own in times.items():
        if name in loops:
            ratios[f"host, {name}"] = 1 + own.thread_more / bare.thread
        rows.append([name, f"{own.thread:.1f}", f"{own.thread_more:+.1f}", f"{own.wall:.1f}", f"{own.wall_more:+.1f}"])
    print(f"{hooks} hooks, a log line every {SETTINGS['log_every']} iterations; microseconds an iteration")
    print(table(["", "main thread", "more", "wall", "more"], rows))
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
