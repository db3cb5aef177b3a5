"""Measure saves to and starts from a bucket, an emulator on this machine: python -m
benchmarks.bucket

The first part saves 1 GiB to a disk and to the bucket, and prints how long the call blocks the
training, and how long the save takes in all. The second part resumes a run in a bucket with 1,000
checkpoints, where each request takes 30 ms, and prints the number of requests and the time until
the first step.
"""

import collections
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax.numpy as jnp
import numpy as np

from jengine.checkpoint import Checkpointer
from jengine.hooks import Hook
from tests.crash import job
from tests.object_stores import serve_google_storage

DELAY = 0.03  # seconds of each request: about that of a bucket in the same region
SIZE = 2**30  # bytes


def time_saves(url, directory):
    """Return (blocked, all) seconds of a save, the least of six, by place."""
    state = {
        "params": {
            f"layer_{i}": jnp.asarray(np.random.rand(SIZE // 32 // 4).astype("f"))
            for i in range(32)
        }
    }
    times = {"disk": [], "bucket": []}
    for i in range(6):  # in turn, as the machine may be slower for a while
        for name, root in (("disk", str(directory)), ("bucket", url)):
            checkpointer = Checkpointer(root)
            start = time.perf_counter()
            checkpointer.save(
                f"{root}/iter_{i}", state, {"meta": {"iter": i}}, evict=[f"iter_{i - 1}"]
            )
            blocked = time.perf_counter() - start
            checkpointer.close()
            times[name].append((blocked, time.perf_counter() - start))
    return {name: tuple(map(min, zip(*pairs, strict=True))) for name, pairs in times.items()}


class FirstStep(Hook):
    """Note the time of the first step, and the requests until then."""

    def __init__(self, store):
        self.store = store
        self.time = None
        self.requests = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        """Note both once."""
        if self.time is None:
            self.time, self.requests = time.perf_counter(), list(self.store.requests)


def measure_start(store, checkpoints=1000):
    """Return the requests and the seconds from the constructor to the first step of a run that
    resumes.
    """
    url = f"{store.make_bucket()}/run"
    job.main(url, 12)
    for number in range(1000, 1000 + checkpoints):
        store.copy(f"{url}/iter_12", f"{url}/iter_{number}")
    found = []
    for delay, iterations in ((0.0, 13), (0.0, 14), (DELAY, 15)):  # the first one compiles
        store.delay, hook = delay, FirstStep(store)
        store.requests.clear()
        start = time.perf_counter()
        job.main(url, iterations, hooks=[hook])
        found.append((hook.requests, hook.time - start))
    (_, without), (requests, with_delay) = found[1:]
    return requests, with_delay - without


@contextlib.contextmanager
def serve_in_child():
    """Run the emulator in a process of its own, as its memory and its thread would slow down
    this one.
    """
    code = (
        "import json; from tests.object_stores import GoogleStorage; store = GoogleStorage(); "
        "print(json.dumps([store.environment, store.make_bucket()]), flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    environment, bucket = json.loads(child.stdout.readline())
    os.environ.update(environment)
    yield bucket
    child.kill()


def main():
    """Print the results; the second part runs in another process, since TensorStore reads the
    address once.
    """
    if sys.argv[1:] == ["start"]:
        with serve_google_storage() as store:
            requests, seconds = measure_start(store)
        counts = collections.Counter(method for method, _ in requests)
        print(
            f"a start with 1,000 checkpoints has {counts.total()} requests {dict(counts)}, and "
            f"waits {seconds:.2f} s"
        )
        return
    with tempfile.TemporaryDirectory() as directory, serve_in_child() as bucket:
        for place, (blocked, total) in time_saves(f"{bucket}/run", pathlib.Path(directory)).items():
            print(
                f"a save of 1 GiB to the {place} blocks for {blocked:.2f} s and takes {total:.2f} s"
            )
    subprocess.run([sys.executable, "-m", "benchmarks.bucket", "start"], check=True)


if __name__ == "__main__":
    main()
