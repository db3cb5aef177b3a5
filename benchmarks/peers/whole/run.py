"""Measure whole processes, from the command to the final metric, with a cold and a warm cache."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np

from benchmarks.peers.whole.tasks import TASKS
from benchmarks.report import table

TITLE = "Peers: whole runs, from the command to the final metric"
HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
# The system, the environment of the peer that it runs in, and whether it keeps compiled programs.
SYSTEMS = {
    "by hand": ("jengine", True),
    "jengine": ("jengine", True),
    "keras": ("keras", True),
    "lightning": ("lightning", False),
    "hf": ("hf", False),
}
TITLES = {
    "by hand": "script by hand (Flax, optax, Orbax)",
    "keras": "Keras 3 on JAX",
    "lightning": "Lightning, PyTorch",
    "hf": "HF Trainer, PyTorch",
}


class Cost(NamedTuple):
    """Hold the wall time of a process, the CPU time of its threads, its peak memory, its metric."""

    wall: float
    cpu: float
    mebibytes: float
    metric: float


def write_data(task, file):
    """Write the arrays of a task: those that the datasets of its config provide."""
    from jengine import load_config
    from jengine.config.registry import DATASETS

    config = load_config(f"configs/{TASKS[task].config}")
    arrays = {}
    for split in ("train", "test"):
        loader = config.train_dataloader if split == "train" else config.val_dataloader
        dataset = DATASETS.build(loader.dataset)
        samples = [dataset[i] for i in range(len(dataset))]
        keys = ("image", "label") if "image" in samples[0] else ("tokens", "targets")
        for name, key in zip("xy", keys, strict=True):
            arrays[f"{split}_{name}"] = np.stack([sample[key] for sample in samples])
    np.savez(file, **arrays)


def make_command(system, python, task, data, directory):
    """Return the command line of a run."""
    if system == "jengine":
        changes = [f"--config.{change}" for change in TASKS[task].changes]
        config = str(ROOT / "configs" / TASKS[task].config)
        program = pathlib.Path(python).parent / "jengine"
        return [str(program), "train", config, "--work-dir", str(directory), *changes]
    module = f"benchmarks.peers.whole.by_{system.removeprefix('by ')}"
    return [python, "-m", module, task, str(data), str(directory)]


def read_metric(system, directory):
    """Return the metric of the last validation."""
    if system != "jengine":
        return json.loads((directory / "result.json").read_text())["metric"]
    (file,) = directory.rglob("scalars.json")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    scores = [line for line in lines if "lr" not in line and {"accuracy/top1", "loss"} & set(line)]
    return scores[-1].get("accuracy/top1", scores[-1].get("loss"))


def measure(system, python, task, data, cache):
    """Run a system once in a new process and return its `Cost`."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch) / "run"
        variables = dict(
            JAX_COMPILATION_CACHE_DIR=str(cache),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PLATFORMS="cpu",
            CUDA_VISIBLE_DEVICES="",
        )
        command = make_command(system, python, task, data, directory)
        log = pathlib.Path(scratch) / "log.txt"
        # if set, each process would compile the sources of jengine, unlike with an installation
        environment = {**os.environ, **variables}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        start = time.perf_counter()
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
            )
            _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(log.read_text().strip().splitlines()[-1][:120])
        cpu = usage.ru_utime + usage.ru_stime
        return Cost(wall, cpu, usage.ru_maxrss / 1024, read_metric(system, directory))


def main(names, rounds, ensure_environment):
    """Print the table of all tasks.

    Args:
      names: systems; the script by hand is always one.
      rounds: runs of each with a cold and with a warm cache; the table has medians.
      ensure_environment: returns the interpreter of a peer.

    Returns:
      The text of the table.
    """
    systems = list(dict.fromkeys(["by hand", *(names or SYSTEMS)]))
    rows, failures, pythons = [], [], {}
    for system in systems:
        pythons[system] = ensure_environment(SYSTEMS[system][0])
    for task in TASKS:
        costs = {(system, kind): [] for system in systems for kind in ("cold", "warm")}
        failed = set()
        with tempfile.TemporaryDirectory() as scratch:
            data = pathlib.Path(scratch) / "data.npz"
            write_data(task, data)
            for i in range(rounds):
                for system in systems:
                    for kind in ("cold", "warm"):
                        cache = pathlib.Path(scratch) / f"{system}_{i}"  # the warm run follows
                        if system in failed or (kind == "warm" and not SYSTEMS[system][1]):
                            continue
                        try:
                            cost = measure(system, pythons[system], task, data, cache)
                        except RuntimeError as error:
                            failures.append(f"{task}, {system}: {error}")
                            failed.add(system)
                            continue
                        costs[system, kind].append(cost)
                        print(f"{task} {system} {kind}: {cost}", file=sys.stderr, flush=True)
        rows += make_rows(task, systems, costs)
    columns = ["task", "system", "cache", "wall s", "ratio", "CPU s", "ratio", "MiB", "metric"]
    return "\n".join([table(columns, rows), *failures])


def make_rows(task, systems, costs):
    """Yield the rows of a task, with ratios to the script by hand."""
    for kind in ("cold", "warm"):
        reference = None
        for system in systems:
            # without a cache, the only runs there are
            found = costs[system, kind] or costs[system, "cold"]
            if not found:
                continue
            median = Cost(*map(statistics.median, zip(*found, strict=True)))
            reference = reference or median
            yield [
                task,
                TITLES.get(system, system),
                kind,
                f"{median.wall:.1f}",
                f"{median.wall / reference.wall:.2f}",
                f"{median.cpu:.1f}",
                f"{median.cpu / reference.cpu:.2f}",
                f"{median.mebibytes:.0f}",
                f"{median.metric:.4f}",
            ]
