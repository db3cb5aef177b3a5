"""Measure checkpoints: the time that a save blocks the loop, and the memory that saving and restoring take.

The state is that of Adam: parameters and two moments, float32. Ratios compare medians of one process, measured in
turns. A save is compared with a copy of every array into new host memory, which the next step does not overwrite. Peak
memory is that of a process for each measurement, minus its memory after everything was imported and compiled on a
small state; it includes the state itself.

    python -m benchmarks.checkpoint [--parameters 100000000] [--rounds 5] [--directory DIR] [--json FILE]
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.report import write_ratios
from jengine.checkpoint import Checkpointer, find_latest, restore

LEAVES = 100


def make_step(parameters):
    """Return Adam on a quadratic: `init() -> state`, and a step that donates its state."""
    optimizer = optax.adam(1e-3)

    @jax.jit
    def init_kernel(i):
        return jnp.sin(jnp.arange(parameters // LEAVES) + i)  # does not compress, as weights do not

    def init():
        params = {f"layer_{i}": {"kernel": init_kernel(float(i))} for i in range(LEAVES)}
        return {"params": params, "opt_state": optimizer.init(params)}

    def step(state):
        updates, opt_state = optimizer.update(state["params"], state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    return init, jax.jit(step, donate_argnums=0)


def copy_to_host(state):
    """Copy the whole state to new host memory; on a CPU `device_get` would only return a view of device memory."""
    if jax.default_backend() == "cpu":
        return [np.array(leaf) for leaf in jax.tree.leaves(state)]
    return jax.device_get(jax.tree.map(jnp.copy, state))  # of fresh arrays: JAX caches fetched values


def run_saves(parameters, directory, rounds):
    """Save between steps; return median seconds by phase, without the first round."""
    init, step = make_step(parameters)
    state = jax.block_until_ready(step(init()))
    checkpointer = Checkpointer(directory)
    names = ("a step", "copy to host", "save, blocked", "save and a step", "save, to the end")
    seconds = {name: [] for name in names}
    for number in range(rounds + 1):
        start = time.perf_counter()
        state = jax.block_until_ready(step(state))
        seconds["a step"].append(time.perf_counter() - start)
        start = time.perf_counter()
        copy_to_host(state)
        seconds["copy to host"].append(time.perf_counter() - start)
        start = time.perf_counter()
        previous = [directory / f"iter_{number - 1}"] if number else []
        checkpointer.save(directory / f"iter_{number}", state, {"meta": {"iter": number}}, evict=previous)
        seconds["save, blocked"].append(time.perf_counter() - start)
        state = jax.block_until_ready(step(state))
        seconds["save and a step"].append(time.perf_counter() - start)
        checkpointer.wait()
        seconds["save, to the end"].append(time.perf_counter() - start)
    checkpointer.close()
    return {name: statistics.median(values[1:] or values) for name, values in seconds.items()}


def run_steps(parameters, directory, rounds):
    """Run steps alone."""
    init, step = make_step(parameters)
    state = init()
    for _ in range(rounds + 1):
        state = step(state)
    jax.block_until_ready(state)
    return {}


def run_restore(parameters, directory, rounds):
    """Restore onto the device, where no state was before; return seconds."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(make_step(parameters)[0]),
    )
    start = time.perf_counter()
    state, _ = restore(find_latest(directory), target)
    jax.block_until_ready(state)
    return {"restore": time.perf_counter() - start}


MEASUREMENTS = {"steps": run_steps, "saves": run_saves, "restore": run_restore}


def peak_memory():
    """Return the peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(name, parameters, directory, rounds):
    """Run one measurement on a small state, then on the real one; print seconds and peak memory as JSON."""
    with tempfile.TemporaryDirectory() as small:
        run_saves(LEAVES, Path(small), 0)
        MEASUREMENTS[name](LEAVES, Path(small), 0)
    before = peak_memory()
    seconds = MEASUREMENTS[name](parameters, directory, rounds)
    print(json.dumps({"seconds": seconds, "peak": peak_memory() - before}))


def main():
    """Print the times, their ratios and the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where checkpoints go, a temporary directory by default")
    parser.add_argument("--json", help="where the ratios are written to")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.parameters, args.directory, args.rounds)
        return
    found = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for name in MEASUREMENTS:
            command = [sys.executable, "-m", "benchmarks.checkpoint", "--measure", name, "--directory", directory]
            command += ["--parameters", str(args.parameters), "--rounds", str(args.rounds)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[name] = json.loads(out.splitlines()[-1])
    write_ratios(args.json, report(found, args.parameters))


def report(found, parameters):
    """Print the measurements; return the ratios that later runs are compared with."""
    state = 3 * parameters // LEAVES * LEAVES * 4
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__}, {device}, {parameters:,} parameters with Adam: {state / 2**20:,.0f} MiB")
    seconds = {**found["saves"]["seconds"], **found["restore"]["seconds"]}
    for name, value in seconds.items():
        print(f"  {name:<18} {value:8.3f} s")
    copy, blocked = seconds["copy to host"], seconds["save, blocked"]
    after = max(seconds["save and a step"] - blocked - seconds["a step"], 0.0)
    print(f"blocked by a save, over the copy to the host:  {blocked / copy:.2f}")
    print(f"with what the next step takes longer, over it: {(blocked + after) / copy:.2f}")
    print(f"blocked by a save, over a save waited for:     {blocked / seconds['save, to the end']:.2f}")
    for name in found:
        print(f"peak memory of {name:<8} over the state: {found[name]['peak'] / state:.2f}")
    return {
        "checkpoint, blocked over a copy to the host": blocked / copy,
        "checkpoint, peak memory of saves over the state": found["saves"]["peak"] / state,
    }


if __name__ == "__main__":
    main()
