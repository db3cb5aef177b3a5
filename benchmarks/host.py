"""Measure the host overhead of the Runner: an iteration with the default hooks alone, and with
further ones, compared with a bare call of the step.

    python -m benchmarks.host [--rounds 9] [--json FILE]

It trains the tiny MLP with a log line every 10 iterations. The bare call is the jitted step of the
hand-written loop. The ratio is computed from the CPU time of the main thread, which does not
include other load on the machine; the table also shows the wall time. In one row the step
computes nothing: that is the path of the Runner alone, without what a call of a compiled step costs
after other work.
"""

import argparse
import itertools
import tempfile

import jax

from benchmarks.by_hand import HandWrittenLoop
from benchmarks.by_runner import RunnerLoop
from benchmarks.cases import CASES
from benchmarks.report import table, write_ratios
from benchmarks.timing import compare

HOOKS = [
    dict(type="CheckInvalidLossHook", interval=50),
    dict(type="EarlyStoppingHook", monitor="accuracy/top1"),
    # would run garbage collection after every block
    dict(type="EmptyCacheHook", after_epoch=False),
    dict(type="MemoryProfilerHook", interval=500),
    dict(type="ProfilerHook", by_epoch=False, schedule=dict(wait=10**9, warmup=0, active=1)),
    dict(type="SetEpochInfoHook"),
    dict(type="SyncBuffersHook"),
    dict(type="CheckInvalidLossHook", interval=100),
    dict(
        type="CheckpointHook",
        by_epoch=False,
        interval=10**9,
        save_last=False,
        filename_tmpl="second_{}",
    ),
]
SETTINGS = dict(log_every=10, save_every=10**9)


def bare_calls(hand):
    """Return `run(iters)`, which only calls the step."""
    batches = itertools.cycle(hand.batches)

    def run(iters):
        step = hand.step
        state = hand.state
        for batch in itertools.islice(batches, iters):
            state, _ = step(state, batch)
        hand.state = jax.block_until_ready(state)

    return run


def skip_step(loop):
    """Return a `RunnerLoop` whose step returns the same result at each call."""
    programs = loop.runner.programs
    step = programs.compiled["update"]
    results = []

    def run(*args):
        if not results:
            results.append(jax.block_until_ready(step(*args)))
        return results[0]

    programs.compiled["update"] = run
    return loop


def main(argv=None):
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file to write the ratios to")
    args = parser.parse_args(argv)
    case = CASES[0]
    with tempfile.TemporaryDirectory() as work_dir:
        loops = {
            "Runner, default hooks": RunnerLoop(case, f"{work_dir}/default", **SETTINGS),
            "default hooks, no step": skip_step(RunnerLoop(case, f"{work_dir}/path", **SETTINGS)),
            "Runner": RunnerLoop(case, f"{work_dir}/runner", **SETTINGS, hooks=HOOKS),
            "Runner, chunks of 10": RunnerLoop(
                case, f"{work_dir}/10", **SETTINGS, hooks=HOOKS, steps_per_call=10
            ),
        }
        num_hooks = len(loops["Runner"].runner.hooks)
        hand = HandWrittenLoop(case, f"{work_dir}/hand")
        runs = {"bare calls": bare_calls(hand), **{name: loop.run for name, loop in loops.items()}}
        for run in runs.values():
            run(2 * case.block)
        times = compare(runs, case.block, case.turns, args.rounds)
        for loop in (hand, *loops.values()):
            loop.close()
    bare = times["bare calls"]
    rows = []
    ratios = {}
    for name, time in times.items():
        if name in loops:
            ratios[f"host, {name}"] = 1 + time.thread_overhead / bare.thread
        rows.append(
            [
                name,
                f"{time.thread:.1f}",
                f"{time.thread_overhead:+.1f}",
                f"{time.wall:.1f}",
                f"{time.wall_overhead:+.1f}",
            ]
        )
    print(
        f"{num_hooks} hooks unless the table says otherwise, a log line every "
        f"{SETTINGS['log_every']} iterations; microseconds per iteration"
    )
    print(table(["", "main thread", "overhead", "wall", "overhead"], rows))
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
