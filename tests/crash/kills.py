"""Kill the job of `job.py` at random moments and compare its results with those of an uninterrupted run."""

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
TIMEOUT = 120.0  # seconds


def start(work_dir, iterations):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(work_dir.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(JOB), str(work_dir), str(iterations)]
    with open(work_dir.with_suffix(".out"), "a") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**cache, **os.environ})


def read_log(work_dir):
    """Return the logged values without the times.

    A job that was killed before its first checkpoint starts from scratch with a new log: only the newest log counts.
    """
    newest = max(work_dir.glob("*/vis_data/scalars.json"), default=None)
    lines = [json.loads(line) for line in newest.open()] if newest else []
    lines = [line for line in lines if "seconds/setup" not in line]  # the report of times at the end of the run
    return [{name: value for name, value in line.items() if "time" not in name} for line in lines]


def last_iteration(work_dir):
    return max((line.get("iter", 0) for line in read_log(work_dir)), default=0)


def finish(work_dir, iterations):
    """Run the job to its end."""
    code = start(work_dir, iterations).wait(TIMEOUT)
    assert code == 0, work_dir.with_suffix(".out").read_text()[-3000:]


def interrupt(work_dir, iterations, signum, rng):
    """Start the job and send it a signal after a random number of iterations and a random pause.

    Returns:
      Whether the signal interrupted it before its end.
    """
    before = last_iteration(work_dir)
    goal, pause = rng.randint(1, max(1, (iterations - before) // 2)), rng.uniform(0.0, 0.08)
    job, start_time = start(work_dir, iterations), time.monotonic()
    first_size = None
    while job.poll() is None:
        size = sum(path.stat().st_size for path in work_dir.glob("*/vis_data/scalars.json"))
        first_size = size if first_size is None else first_size
        logged = last_iteration(work_dir) if size != first_size else before
        if logged >= before + goal:
            time.sleep(pause)
            job.send_signal(signum)
            break
        assert time.monotonic() - start_time < TIMEOUT, work_dir.with_suffix(".out").read_text()[-3000:]
        time.sleep(0.002)
    code = job.wait(TIMEOUT)
    output = work_dir.with_suffix(".out").read_text()[-3000:]
    assert signum != signal.SIGTERM or code in (0, 143), f"exit code {code}: {output}"
    return code != 0


def assert_equal_results(work_dir, reference_dir):
    """Compare the last checkpoints and the logs of two runs, bit for bit."""
    actual, expected = checkpoint.load(work_dir), checkpoint.load(reference_dir)
    assert actual.meta["meta"]["iter"] == expected.meta["meta"]["iter"]
    jax.tree.map(np.testing.assert_array_equal, actual.state, expected.state)
    assert actual.meta["hooks"]["CheckpointHook"] == expected.meta["hooks"]["CheckpointHook"]
    assert read_log(work_dir) == read_log(reference_dir)


def run(directory, kills, seed, signum=signal.SIGKILL, iterations=40):
    """Interrupt a run `kills` times, let it finish, and compare it with an uninterrupted one.

    Returns:
      How many of the signals interrupted it before its end.
    """
    rng, directory = random.Random(seed), pathlib.Path(directory)
    reference_dir, work_dir = directory / "reference", directory / f"interrupted_{signum}_{seed}"
    if not reference_dir.exists():
        finish(reference_dir, iterations)
    interruptions = sum(interrupt(work_dir, iterations, signum, rng) for _ in range(kills))
    finish(work_dir, iterations)
    assert_equal_results(work_dir, reference_dir)
    return interruptions
