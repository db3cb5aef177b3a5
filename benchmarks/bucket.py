"""Measure saves to and starts from a bucket, an emulator on this machine: python -m benchmarks.bucket

The first part saves 1 GiB to a disk and to the bucket, and prints how long the call blocks the training, and how long
the save takes in all. The second part resumes a run in a bucket with 1,000 checkpoints, where each request takes 30 ms,
and prints the number of requests and the time until the first step.
"""

import collections
import pathlib
import statistics
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
    """Return (blocked, all) seconds of a save, medians of three, by place."""
    state = {"params": {f"layer_{i}": jnp.asarray(np.random.rand(SIZE // 32 // 4).astype("f")) for i in range(32)}}
    found = {}
    for name, root in (("disk", str(directory)), ("bucket", url)):
        times = []
        for i in range(3):
            checkpointer = Checkpointer(root)
            start = time.perf_counter()
            checkpointer.save(f"{root}/iter_{i}", state, {"meta": {"iter": i}}, evict=[f"iter_{i - 1}"])
            blocked = time.perf_counter() - start
            checkpointer.close()
            times.append((blocked, time.perf_counter() - start))
        found[name] = tuple(map(statistics.median, zip(*times, strict=True)))
    return found


class FirstStep(Hook):
    """Note the time of the first step, and the requests until then."""

    def __init__(self, store):
        self.store, self.time, self.requests = store, None, []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        """Note both once."""
        if self.time is None:
            self.time, self.requests = time.perf_counter(), list(self.store.requests)


def measure_start(store, checkpoints=1000):
    """Return the requests and the seconds from the constructor to the first step of a run that resumes."""
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


def main():
    """Print the results."""
    with tempfile.TemporaryDirectory() as directory, serve_google_storage() as store:
        for place, (blocked, total) in time_saves(f"{store.make_bucket()}/run", pathlib.Path(directory)).items():
            print(f"a save of 1 GiB to the {place} blocks for {blocked:.2f} s and takes {total:.2f} s")
        requests, seconds = measure_start(store)
        print(f"a start with 1,000 checkpoints has {len(requests)} requests, for which it waits {seconds:.2f} s")
        for method, count in sorted(collections.Counter(method for method, _ in requests).items()):
            print(f"  {method}: {count}")


if __name__ == "__main__":
    main()
