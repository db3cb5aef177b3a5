"""Kills the job of `job.py` at random moments and holds what it ends with against a run that was left alone."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np

from jengine import checkpoint

JOB = pathlib.Path(__file__).parent / "job.py"
ROOT = JOB.parent.parent.parent
PATIENCE = 120.0  # seconds that a job may be silent


def start(work_dir, iterations):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(work_dir.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(JOB), str(work_dir), str(iterations)]
    with open(work_dir.with_suffix(".out"), "a") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**cache, **os.environ})


def lines(work_dir):
    """What the run has logged, but for the times. A job killed before its first checkpoint is not continued but
    begun anew, with logs of its own: those count."""
    newest = max(work_dir.glob("*/vis_data/scalars.json"), default=None)
    found = [json.loads(line) for line in newest.open()] if newest else []
    account = [line for line in found if "seconds/setup" in line]  # of the time of the run, at its end
    return [{k: v for k, v in line.items() if "time" not in k} for line in found if line not in account]


def finish(work_dir, iterations):
    """Lets the job run to its end."""
    code = start(work_dir, iterations).wait(PATIENCE)
    assert code == 0, work_dir.with_suffix(".out").read_text()[-3000:]


def interrupt(work_dir, iterations, signum, rng):
    """Starts the job and sends it a signal after a random number of iterations and a random while.

    Returns:
      Whether the signal came before the end.
    """
    before = max((line.get("iter", 0) for line in lines(work_dir)), default=0)
    goal, pause = rng.randint(1, max(1, (iterations - before) // 2)), rng.uniform(0.0, 0.08)
    job, begun = start(work_dir, iterations), time.monotonic()
    first = None
    while job.poll() is None:
        size = sum(path.stat().st_size for path in work_dir.glob("*/vis_data/scalars.json"))
        first = size if first is None else first
        written = max((line.get("iter", 0) for line in lines(work_dir)), default=0) if size != first else before
        if written >= before + goal:
            time.sleep(pause)
            job.send_signal(signum)
            break
        assert time.monotonic() - begun < PATIENCE, work_dir.with_suffix(".out").read_text()[-3000:]
        time.sleep(0.002)
    code = job.wait(PATIENCE)
    if signum == signal.SIGTERM and code not in (0, 143):
        raise AssertionError(f"exit code {code}: {work_dir.with_suffix('.out').read_text()[-3000:]}")
    return code != 0


def same_end(work_dir, whole):
    """Holds the last checkpoint and the log of two runs against each other, bit for bit."""
    ours, theirs = (checkpoint.load(d) for d in (work_dir, whole))
    assert ours.meta["meta"]["iter"] == theirs.meta["meta"]["iter"]
    jax.tree.map(np.testing.assert_array_equal, ours.state, theirs.state)
    assert ours.meta["hooks"]["CheckpointHook"] == theirs.meta["hooks"]["CheckpointHook"]
    assert lines(work_dir) == lines(whole)


def run(directory, kills, seed, signum=signal.SIGKILL, iterations=40):
    """Interrupts a run `kills` times, lets it end, and compares it with one that was left alone.

    Returns:
      How often the signal came in time.
    """
    rng, directory = random.Random(seed), pathlib.Path(directory)
    whole, broken = directory / "whole", directory / f"broken_{signum}_{seed}"
    if not whole.exists():
        finish(whole, iterations)
    came = sum(interrupt(broken, iterations, signum, rng) for _ in range(kills))
    finish(broken, iterations)
    same_end(broken, whole)
    return came
