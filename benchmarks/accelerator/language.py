"""Train `configs/lm.py:124m` in bfloat16: tokens per second, utilization, memory, and the plan for
this chip.

    python -m benchmarks.accelerator.language [--tiny]

Utilization is PaLM's (Chowdhery et al. 2022, appendix B): 6 FLOPs per token for each parameter but
the embedding's, and 12 x layers x width x length for attention, over the peak of the chip's data
sheet.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.accelerator.rows import record, record_close
from benchmarks.by_runner import StopAfterBlock, discard_terminal_output
from benchmarks.language_model import make_update
from benchmarks.timing import compare
from configs.lm import SIZES
from jengine import Runner
from jengine.config import load_config, resolve
from jengine.extras.networks import TransformerLM

SHAPES = {
    False: [(32, 1024), (4, 8192)],
    True: [(2, 64)],
}  # examples and tokens of each, by whether tiny
CHIPS = {"H100": "h100:1", "H200": "h200:1", "A100": "a100:1", "B200": "b200:1"}


def make_batches(size, batch, length, count=4):
    """Return host batches of random tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, SIZES[size]["vocab_size"], (count, batch, length + 1)).astype(np.int32)
    return [{"tokens": rows[:, :-1], "targets": rows[:, 1:]} for rows in tokens]


class RunnerLoop:
    """Train the config block by block, with what `change` does to it first."""

    def __init__(self, size, batches, work_dir, change=lambda cfg: None):
        discard_terminal_output()
        cfg = resolve(load_config(f"configs/lm.py:{size}"))
        cfg |= dict.fromkeys(
            ("val_dataloader", "val_cfg", "val_evaluator", "test_dataloader", "test_cfg")
        )
        cfg |= dict(
            test_evaluator=None, train_dataloader=batches, work_dir=work_dir, log_level="WARNING"
        )
        cfg |= dict(default_hooks=dict(logger=None, checkpoint=None))
        cfg["train_cfg"] = dict(by_epoch=False, max_iters=1_000_000)
        self._stop = StopAfterBlock()
        self._stop.last_iter = 2
        cfg["custom_hooks"] = [self._stop]
        change(cfg)
        self.runner = Runner.from_cfg(cfg)
        self.runner.train()

    def run(self, iters):
        """Train for `iters` more iterations and wait for the last."""
        loop = self.runner.train_loop
        self._stop.last_iter = loop.iter + iters
        loop.stop_training = False
        loop.run()
        self.runner.run.limiter.drain()


class HandLoop:
    """Train the same module with optax alone."""

    def __init__(self, size, batches):
        module = TransformerLM(**SIZES[size])
        schedule = optax.warmup_cosine_decay_schedule(0.0, 6e-4, 1000, 50_000)
        tx = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1)
        )
        init = jax.jit(
            lambda key: module.init(key, jnp.asarray(batches[0]["tokens"][:1]))["params"]
        )
        params = init(jax.random.key(0))
        self.state = dict(params=params, opt_state=jax.jit(tx.init)(params))
        self.step = jax.jit(make_update(module, tx), donate_argnums=0)
        self.batches = batches
        self.iter = 0
        self.run(2)

    def run(self, iters):
        """Train for `iters` more iterations and wait for the last; the next batch is put ahead."""
        state = self.state
        batch = jax.device_put(self.batches[self.iter % len(self.batches)])
        for i in range(self.iter + 1, self.iter + iters + 1):
            upcoming = jax.device_put(self.batches[i % len(self.batches)])
            state, _ = self.step(state, batch)
            batch = upcoming
        self.state = jax.block_until_ready(state)
        self.iter += iters


def peak_memory():
    """Return the peak of the device's memory in bytes, or 0 if it is unknown."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def print_peak(kind, size, batch, length):
    """Train a few steps in this process, and print the peak of the memory and the seconds to the
    first step.
    """
    start = time.perf_counter()
    batches = make_batches(size, batch, length)
    with tempfile.TemporaryDirectory() as directory:
        loop = HandLoop(size, batches) if kind == "hand" else RunnerLoop(size, batches, directory)
        started = time.perf_counter() - start
        loop.run(3)
    print("result", json.dumps(dict(peak=peak_memory(), started=started)))


def run_child(*arguments):
    """Run this module in another process and return what it found, or record how it failed."""
    command = [sys.executable, "-m", "benchmarks.accelerator.language", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if not lines:
        record(" ".join(map(str, arguments)), done.stderr[-400:], "a result", False)
        return None
    return json.loads(lines[-1].removeprefix("result "))


def flops_per_token(params, size, length):
    """Return PaLM's count of FLOPs for a token of a training step."""
    counted = sum(leaf.size for leaf in jax.tree.leaves(params)) - params["embed"]["embedding"].size
    return 6 * counted + 12 * SIZES[size]["depth"] * SIZES[size]["width"] * length


def check_rate(size, batch, length, rounds, block):
    """Record time per step over that by hand, tokens per second and utilization; return the
    seconds of a step.
    """
    from jengine.extras.plan.peak_flops import get_peak_flops

    batches = make_batches(size, batch, length)
    with tempfile.TemporaryDirectory() as directory:
        runner = RunnerLoop(size, batches, directory)
        hand = HandLoop(size, batches)
        times = compare({"by hand": hand.run, "Runner": runner.run}, block, 3, rounds)
        params = runner.runner.state.params
        tokens = batch * length
        name = f"{batch} x {length} tokens"
        seconds = times["Runner"].wall / 1e6
        record(f"{name}, by hand: ms per step", times["by hand"].wall / 1e3)
        record(f"{name}: ms per step", times["Runner"].wall / 1e3)
        record(f"{name}: time / by hand", str(times["Runner"].ratio))
        record(f"{name}: tokens/s", tokens / seconds)
        peak = get_peak_flops(jax.devices()[0].device_kind).get("bfloat16")
        flops = flops_per_token(params, size, length) * tokens
        record(f"{name}: TFLOP/s", flops / seconds / 1e12)
        if peak:
            record(f"{name}: model FLOPs utilization", flops / seconds / peak)
    return seconds


def check_memory(size, batch, length):
    """Record the peaks of a process with the Runner and one by hand; return that with the
    Runner, 0 if unknown.
    """
    peaks = {}
    for kind in ("runner", "hand"):
        found = run_child("--peak", kind, "--size", size, "--batch", batch, "--length", length)
        if found is None:
            return 0
        peaks[kind] = found["peak"]
        record(f"{batch} x {length} tokens, {kind}: peak memory, MiB", found["peak"] / 2**20)
        record(f"{batch} x {length} tokens, {kind}: s to the first steps", found["started"])
    if peaks["hand"]:
        record_close(
            f"{batch} x {length} tokens: peak memory / by hand",
            peaks["runner"] / peaks["hand"],
            1.1,
        )
    return peaks["runner"]


def print_compiled(size, batch, length):
    """Compile the training step for this device, and print the bytes that it holds, by kind."""
    from jengine.extras.plan.plan import set_devices
    from jengine.extras.plan.program_costs import compile_plan

    cfg = resolve(load_config(f"configs/lm.py:{size}", make_overrides(batch, length)))
    program = compile_plan(set_devices(cfg, 1), training_only=True)["programs"]["update"]
    print(
        "result", json.dumps({key: program[key] for key in ("total_memory", "memory", "kernels")})
    )


def make_overrides(batch, length):
    """Return the overrides for a batch of these sizes, of few sentences."""
    data = "--config.train_dataloader"
    sizes = [f"{data}.batch_size={batch}", f"{data}.dataset.length={length}"]
    return [
        *sizes,
        f"{data}.dataset.sentences=4000",
        "--config.val_dataloader.dataset.sentences=800",
    ]


def record_memory(name, found, peak):
    """Record the memory of a program by kind, and its difference from the real peak."""
    for kind, size in found["memory"].items():
        if size > 2**20:
            record(f"{name}: {kind}, MiB", size / 2**20)
    record(f"{name}: memory, MiB", found["total_memory"] / 2**20)
    if peak:
        record_close(f"{name}: |memory / peak - 1|", abs(found["total_memory"] / peak - 1), 0.05)


def check_plan(size, batch, length, seconds, peak):
    """Record the program as compiled here and as planned for this chip, beside the real time and
    memory.
    """
    if found := run_child("--compiled", "--size", size, "--batch", batch, "--length", length):
        record_memory(f"{batch} x {length} tokens, compiled here", found, peak)
        kernels = ", ".join(f"{count} x {name}" for name, count in found["kernels"].items())
        record(
            f"{batch} x {length} tokens, compiled here: kernels, such as attention's",
            kernels or "none",
        )
    kind = jax.devices()[0].device_kind
    chip = next((chip for name, chip in CHIPS.items() if name in kind), None)
    if chip is None:
        record("plan for this chip", f"no topology for {kind}")
        return
    found = run_child("--plan", chip, "--size", size, "--batch", batch, "--length", length)
    if found is None:
        return
    name = f"{batch} x {length} tokens, plan for {chip}"
    record_memory(name, found, peak)
    if found["compiler_seconds"]:  # only the compiler for TPUs estimates it
        record(f"{name}: estimated ms by the compiler", 1e3 * found["compiler_seconds"])
    record(f"{name}: lower bound, ms, by {found['bound_by']}", 1e3 * found["bound_seconds"])
    record(f"{name}: lower bound / real time", found["bound_seconds"] / seconds)


def print_plan(chip, size, batch, length):
    """Print the plan of the training step for a chip."""
    from jengine.extras.plan.plan_process import compile_candidates
    from jengine.extras.plan.topologies import check_compiler, parse_topology

    topology = parse_topology(chip)
    check_compiler(topology)
    candidate = dict(mesh=None, overrides=make_overrides(batch, length))
    (result,) = compile_candidates(
        f"configs/lm.py:{size}", [], topology, [candidate], training_only=True
    )
    if "error" in result:
        raise RuntimeError(result["error"] + result["traceback"])
    program = result["plan"]["programs"]["update"]
    keys = ("total_memory", "compiler_seconds", "bound_seconds", "bound_by", "memory")
    print("result", json.dumps({key: program.get(key) for key in keys}))


def main():
    """Run all measurements, or one of them in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--peak", choices=("hand", "runner"), help=argparse.SUPPRESS)
    parser.add_argument("--plan", metavar="CHIP", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    for name in ("--size", "--batch", "--length"):
        parser.add_argument(name, type=str if name == "--size" else int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print_peak(args.peak, args.size, args.batch, args.length)
        return
    if args.compiled:
        print_compiled(args.size, args.batch, args.length)
        return
    if args.plan:
        print_plan(args.plan, args.size, args.batch, args.length)
        return
    size = "toy" if args.tiny else "124m"
    with tempfile.TemporaryDirectory() as cache:
        # Processes that compile the same program compile it once.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        jax.config.update("jax_compilation_cache_dir", cache)
        for number, (batch, length) in enumerate(SHAPES[args.tiny]):
            seconds = check_rate(size, batch, length, 1 if args.tiny else 2, 2 if args.tiny else 5)
            if number == 0:
                peak = check_memory(size, batch, length)
                check_plan(size, batch, length, seconds, peak)


if __name__ == "__main__":
    main()
