"""Measure checkpoints: how long a save blocks the loop, and the peak memory of saving and
restoring.

The state is that of Adam: parameters and two moments, float32. Ratios compare medians of
  interleaved measurements in
one process. The reference for a save is a copy of every array to new host memory, which the next
step does not overwrite. Peak memory is measured in a separate process for each measurement, after
imports and compilation on a small state, whose memory is subtracted; it includes the state itself.

    python -m benchmarks.checkpoint [--parameters 100000000] [--rounds 5] [--directory DIR] [--json
    FILE]
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
    """Return `init() -> state` and a step of Adam on a quadratic, which donates its state."""
    optimizer = optax.adam(1e-3)

    @jax.jit
    def init_kernel(i):
        # like trained weights, hard to compress
        return jnp.sin(jnp.arange(parameters // LEAVES) + i)

    def init():
        params = {f"layer_{i}": {"kernel": init_kernel(float(i))} for i in range(LEAVES)}
        return {"params": params, "opt_state": optimizer.init(params)}

    def step(state):
        updates, opt_state = optimizer.update(state["params"], state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    return init, jax.jit(step, donate_argnums=0)


def copy_to_host(state):
    """Copy the state to new host memory; on a CPU, `device_get` would only return a view of
    device memory.
    """
    if jax.default_backend() == "cpu":
        return [np.array(leaf) for leaf in jax.tree.leaves(state)]
    return jax.device_get(jax.tree.map(jnp.copy, state))  # new arrays: JAX caches fetched values


def run_saves(parameters, directory, rounds):
    """Save between steps; return the median seconds of each phase without the first round."""
    init, step = make_step(parameters)
    state = jax.block_until_ready(step(init()))
    checkpointer = Checkpointer(directory)
    names = ("step", "copy to host", "save, blocked", "save and step", "save, completed")
    seconds = {name: [] for name in names}
    for number in range(rounds + 1):
        start = time.perf_counter()
        state = jax.block_until_ready(step(state))
        seconds["step"].append(time.perf_counter() - start)
        start = time.perf_counter()
        copy_to_host(state)
        seconds["copy to host"].append(time.perf_counter() - start)
        start = time.perf_counter()
        previous = [directory / f"iter_{number - 1}"] if number else []
        checkpointer.save(
            directory / f"iter_{number}", state, {"meta": {"iter": number}}, evict=previous
        )
        seconds["save, blocked"].append(time.perf_counter() - start)
        state = jax.block_until_ready(step(state))
        seconds["save and step"].append(time.perf_counter() - start)
        checkpointer.wait()
        seconds["save, completed"].append(time.perf_counter() - start)
    checkpointer.close()
    return {name: statistics.median(values[1:] or values) for name, values in seconds.items()}


def run_steps(parameters, directory, rounds):
    """Run steps without saves."""
    init, step = make_step(parameters)
    state = init()
    for _ in range(rounds + 1):
        state = step(state)
    jax.block_until_ready(state)
    return {}


def run_restore(parameters, directory, rounds):
    """Restore onto the device, which holds no other state; return seconds."""
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def measure(name, parameters, directory, rounds):
    """Run one measurement on a small state, then on the large one; print seconds and peak memory
    as JSON.
    """
    with tempfile.TemporaryDirectory() as small:
        run_saves(LEAVES, Path(small), 0)
        MEASUREMENTS[name](LEAVES, Path(small), 0)
    before = peak_memory()
    seconds = MEASUREMENTS[name](parameters, directory, rounds)
    print(json.dumps({"seconds": seconds, "peak": peak_memory() - before}))


def main():
    """Print times, ratios and peak memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory",
        type=Path,
        help="parent directory of the checkpoints, a temporary one by default",
    )
    parser.add_argument("--json", help="file to write the ratios to")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.parameters, args.directory, args.rounds)
        return
    results = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for name in MEASUREMENTS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.checkpoint",
                "--measure",
                name,
                "--directory",
                directory,
            ]
            command += ["--parameters", str(args.parameters), "--rounds", str(args.rounds)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results[name] = json.loads(out.splitlines()[-1])
    write_ratios(args.json, report(results, args.parameters))


def report(results, parameters):
    """Print the measurements; return the ratios that later runs are compared with."""
    state = 3 * parameters // LEAVES * LEAVES * 4
    device = jax.devices()[0].device_kind
    print(
        f"jax {jax.__version__}, {device}, {parameters:,} parameters with Adam: "
        f"{state / 2**20:,.0f} MiB"
    )
    seconds = {**results["saves"]["seconds"], **results["restore"]["seconds"]}
    for name, value in seconds.items():
        print(f"  {name:<18} {value:8.3f} s")
    copy = seconds["copy to host"]
    blocked = seconds["save, blocked"]
    slowdown = max(seconds["save and step"] - blocked - seconds["step"], 0.0)
    print(f"blocked by a save / copy to host:              {blocked / copy:.2f}")
    print(f"the same with slowdown of the next step:       {(blocked + slowdown) / copy:.2f}")
    print(
        f"blocked by a save / completed save:            {blocked / seconds['save, completed']:.2f}"
    )
    for name in results:
        print(f"peak memory of {name:<8} / state: {results[name]['peak'] / state:.2f}")
    return {
        "checkpoint, blocked over a copy to the host": blocked / copy,
        "checkpoint, peak memory of saves over the state": results["saves"]["peak"] / state,
    }


if __name__ == "__main__":
    main()
