"""Kill the job of `job.py` while it saves to a bucket whose requests fail, and compare it with a run on a disk."""

import json
import os
import pathlib
import random
import re
import signal

import jax
import numpy as np

from jengine import checkpoint
from jengine.config.storage import list_files, read_bytes
from tests.crash import kills
from tests.object_stores import FAULTS

ITERATIONS = 12
SETTINGS = {"JENGINE_LEASE_SECONDS": "1", "JENGINE_UPLOAD_SECONDS": "0.2"}


def run(directory, store, count_kills, seed, fault_rate=0.0, count=1):
    """Kill a run at random requests to the store, let it finish, and compare it with an uninterrupted one on a disk.

    Args:
      directory: of the outputs, and of the run on a disk.
      store: the emulated store.
      count_kills: number of kills.
      seed: of the moments and of the faults; with an odd one each start is on another machine.
      fault_rate: share of the requests that fail, in all the ways of `FAULTS`.
      count: number of processes, of which a random one is killed.

    Returns:
      How many kills ended a run before its end, and the number of faults.
    """
    directory, rng = pathlib.Path(directory), random.Random(seed)
    os.environ.update(SETTINGS, JENGINE_LOCAL_DIR=str(directory / "local"))
    reference_dir = kills.make_reference(directory, ITERATIONS, count)
    work_dir, url = directory / f"in_bucket_{seed}_of_{count}", f"{store.make_bucket()}/run"
    killer = _Killer(rng, fault_rate)
    store.choose_fault = killer
    interrupted = 0
    for machine in range(count_kills):
        if seed % 2:  # each start is on another machine
            os.environ["JENGINE_LOCAL_DIR"] = str(directory / f"local_{machine}")
        killer.arm(rng.randint(1, 300))
        jobs, victim = kills.start(work_dir, ITERATIONS, count=count, url=url), rng.randrange(count)
        killer.job = jobs[victim]
        interrupted += kills.wait_for_victim(work_dir, jobs, victim)
    killer.job = None
    kills.finish(work_dir, ITERATIONS, count=count, url=url)
    store.choose_fault = lambda method, path: None
    assert_equal_results(url, reference_dir)
    leftovers = [name for name in list_files(url) if ".incoming" in name or ".outgoing" in name]
    assert not leftovers, leftovers
    return interrupted, killer.faults


class _Killer:
    def __init__(self, rng, fault_rate):
        self.rng, self.fault_rate = random.Random(rng.random()), fault_rate
        self.job, self.left, self.faults = None, 0, 0

    def arm(self, requests):
        self.job, self.left = None, requests

    def __call__(self, method, path):
        self.left -= 1
        if self.left == 0 and self.job is not None:
            self.job.send_signal(signal.SIGKILL)
        if self.rng.random() >= self.fault_rate:
            return None
        self.faults += 1
        return self.rng.choice(FAULTS)


def assert_equal_results(url, reference_dir):
    """Compare the last checkpoint in a bucket and the log with those of a run on a disk, bit for bit.

    The text log has each line up to the checkpoint of each resume.
    """
    actual, expected = checkpoint.load(url), checkpoint.load(reference_dir)
    assert actual.meta["meta"]["iter"] == expected.meta["meta"]["iter"]
    jax.tree.map(np.testing.assert_array_equal, actual.state, expected.state)
    assert actual.meta["hooks"]["CheckpointHook"] == expected.meta["hooks"]["CheckpointHook"]
    assert sorted(map(os.path.basename, checkpoint.list_checkpoints(url))) == sorted(
        map(os.path.basename, checkpoint.list_checkpoints(reference_dir))
    )
    assert read_log(url) == kills.read_log(reference_dir)
    newest = max(name for name in list_files(url) if re.fullmatch(r"[^/]*/\d+_\d+(_\d+)?\.log", name))
    expected_log = max(pathlib.Path(reference_dir).glob("*/*.log")).read_text()
    assert kills.read_text_log(read_bytes(f"{url}/{newest}").decode()) == kills.read_text_log(expected_log)


def read_log(url):
    """Return the logged values without the times, of the newest log."""
    newest = max(name for name in list_files(url) if name.endswith("vis_data/scalars.json"))
    lines = map(json.loads, read_bytes(f"{url}/{newest}").decode().splitlines())
    return kills.without_times(lines)
