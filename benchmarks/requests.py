"""Count what N processes request from one coordination service in each event of a run, and what
they gather.

Every process is real: a fork with a client and devices of its own, which runs jengine's code for
  the event, and Orbax's
for a save. Only collectives are replaced, by an exchange through shared memory: N processes on one
  machine are too many
for gloo. They count as calls, and with the bytes that a process receives. What JAX itself requests,
such as heartbeats, is not counted.

    python -m benchmarks.requests [--processes 16,64,256]
"""

import argparse
import mmap
import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.report import table
from jengine.checkpoint import Checkpointer
from jengine.checkpoint.identity import agree_on_identity
from jengine.config import load_config, resolve
from jengine.data import ArrayDataset
from jengine.parallel import DataShard, ProcessMismatchError, all_gather_objects, get_processes
from jengine.parallel.interrupts import Interrupts
from jengine.runner.dataloaders import DataLoaders
from jengine.runner.resume_data import collect_position

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "digits_cnn.py"
KINDS = ("requests", "request bytes", "collectives", "collective bytes")
LARGEST = 2**20  # bytes that a process contributes to a collective
PATIENCE = 600.0  # seconds
EXTRAPOLATED = 1000  # processes
# Before jengine used JAX's runtime, each of N processes wrote a value, read all, and waited: N x (N
# + 2) requests.
EXCHANGES_BEFORE = ("epoch", "validation", "save")


class Counts:
    """Count per process, event and kind, in memory that the processes share.

    Args:
      count: number of processes.
    """

    def __init__(self, count):
        shape = (count, len(EVENTS), len(KINDS))
        self.array = np.frombuffer(mmap.mmap(-1, 8 * int(np.prod(shape))), np.int64).reshape(shape)
        self.index, self.event = 0, next(iter(EVENTS))
        self._lock = threading.Lock()

    def add(self, kind, size):
        """Count a request or a collective of this process in the current event."""
        row = self.array[self.index, list(EVENTS).index(self.event)]
        with self._lock:
            row[KINDS.index(kind)] += 1
            row[KINDS.index(kind) + 1] += size


class CountingClient:
    """Pass requests on to JAX's client of the coordination service, and count them when they are
    sent.
    """

    def __init__(self, client, counts):
        self._client = client
        self._counts = counts

    def __getattr__(self, name):
        method = getattr(self._client, name)

        def request(*args, **kwargs):
            values = [*args, *kwargs.values()]
            self._counts.add("requests", sum(map(_size, values)))
            return method(*args, **kwargs)

        return request


def _size(value):
    """Return the bytes of an argument; a process in a list has four."""
    return (
        len(value)
        if isinstance(value, str | bytes)
        else 4 * len(value)
        if isinstance(value, list)
        else 8
    )


class Collectives:
    """Replace the collectives of `multihost_utils` by an exchange through shared memory, and count
    them.

    Args:
      count: number of processes.
      counts: where to count.
    """

    def __init__(self, count, counts):
        self._rows = np.frombuffer(mmap.mmap(-1, count * LARGEST), np.uint8).reshape(count, LARGEST)
        self._barrier = multiprocessing.get_context("fork").Barrier(count)
        self._counts = counts

    def wait(self):
        """Wait for all processes."""
        self._barrier.wait(PATIENCE)

    def process_allgather(self, array):
        """Return the arrays of all processes."""
        self._rows[self._counts.index, : array.nbytes] = array.view(np.uint8)
        self.wait()
        gathered = self._rows[:, : array.nbytes].copy()
        self.wait()
        self._counts.add("collectives", gathered.nbytes)
        return gathered.view(array.dtype)

    def broadcast_one_to_all(self, array, is_source):
        """Return the array of the source."""
        if is_source:
            self._rows[0, : array.nbytes] = array.view(np.uint8)
        self.wait()
        received = self._rows[0, : array.nbytes].copy()
        self.wait()
        self._counts.add("collectives", received.nbytes)
        return received.view(array.dtype)


class Process:
    """Run the events as one of the processes.

    Args:
      cfg: the config of the run.
      idle: seconds without work.
      work_dir: the work dir of all.
      count: number of processes.
    """

    def __init__(self, cfg, idle, work_dir, count):
        self._cfg = cfg
        self._idle_time = idle
        self._work_dir = work_dir
        self._count = count
        self._processes = get_processes()
        index = self._processes.index
        # as with `tensor` over pairs of processes, so that first batches are compared too
        self._shard = DataShard(index // 2, count // 2, (index // 2 * 2, index // 2 * 2 + 1))
        data = dict(
            batch_size=2, dataset=ArrayDataset(dict(x=np.arange(4 * count, dtype=np.float32)))
        )
        sections = dict(train_dataloader=data, val_dataloader={"": data}, test_dataloader=None)
        strategy = SimpleNamespace(data_shard=self._shard, batch_multiple=1)
        self._run = SimpleNamespace(seed=0, processes=self._processes, strategy=strategy, cfg=cfg)
        self._loaders = DataLoaders(sections, self._run)
        self._checkpointer = Checkpointer(work_dir, "run")

    def start(self):
        """Compare the configs, the loaders and their first batches."""
        agree_on_identity(self._processes, self._cfg, self._work_dir)
        for mode in ("train", "val"):
            with self._loaders.example(f"{mode}_dataloader"):
                pass

    def find_difference(self):
        """Compare configs of which one differs."""
        cfg = {**self._cfg, "seed": int(self._processes.index == 1)}
        try:
            agree_on_identity(self._processes, cfg, self._work_dir)
        except ProcessMismatchError:
            return
        raise RuntimeError("the processes must find the difference")

    def iterate(self):
        """Check 1,000 times whether a process has received a signal."""
        interrupts = Interrupts(self._processes)
        for _ in range(1000):
            interrupts.check()

    def end_epoch(self):
        """Agree on whether to stop."""
        self._processes.all_gather("the end of an epoch", False)

    def validate(self):
        """Gather what a metric on the host has collected, and send the results of process 0."""
        is_first = self._shard.readers[0] == self._processes.index
        all_gather_objects([0.5] * 100 if is_first else [], "Metric", self._processes)
        self._processes.broadcast("the results of val_dataloader", {"Metric": 0.5})
        self.end_epoch()

    def save(self):
        """Save a state that is divided over all processes."""
        loader = self._loaders.train
        loop = SimpleNamespace(
            dataloader=loader,
            position=loader.state_dict(),
            by_epoch=False,
            epoch_start=0,
            epoch_length=2,
        )
        sharding = jax.sharding.NamedSharding(
            jax.sharding.Mesh(jax.devices(), "data"), jax.sharding.PartitionSpec("data")
        )
        values = np.arange(4 * self._count, dtype=np.float32)
        state = {"w": jax.make_array_from_callback(values.shape, sharding, values.__getitem__)}
        meta = dict(epoch=0, iter=2)
        position = collect_position(self._run, loop, meta)
        self._checkpointer.save(
            f"{self._work_dir}/iter_2", state, dict(meta=meta, position=position)
        )
        self._checkpointer.wait()

    def idle(self):
        """Do nothing."""
        time.sleep(self._idle_time)

    def fail(self):
        """Fail in process 1; the others end when they know."""
        if self._processes.index == 1:
            raise KeyError("colour")
        time.sleep(PATIENCE)


EVENTS = {
    "start": Process.start,
    "other config": Process.find_difference,
    "1,000 iterations": Process.iterate,
    "epoch": Process.end_epoch,
    "validation": Process.validate,
    "save": Process.save,
    "idle": Process.idle,
    "failure": Process.fail,
}


def run_process(index, count, cfg, idle, work_dir, address, counts, collectives):
    """Connect to the coordination service and run all events, the last of which ends this
    process.
    """
    from jax._src import distributed

    counts.index = index
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(address, count, index, cluster_detection_method="deactivate")
    jax.devices()  # needs JAX's own client
    distributed.global_state.client = CountingClient(distributed.global_state.client, counts)
    multihost_utils.process_allgather = collectives.process_allgather
    multihost_utils.broadcast_one_to_all = collectives.broadcast_one_to_all
    process = Process(cfg, idle, work_dir, count)
    for name, event in EVENTS.items():
        collectives.wait()
        counts.event = name
        collectives.wait()
        event(process)


def fork(output, function, *args):
    """Call a function in a fork of this process, with its output in a file, and return the
    process id.
    """
    if pid := os.fork():
        return pid
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        function(*args)
    except BaseException:
        # reports the failure to the other processes, once they are connected
        sys.excepthook(*sys.exc_info())
    os._exit(2)


def count_requests(count, idle=5.0):
    """Run processes and return what each has counted.

    Args:
      count: number of processes, an even one.
      idle: seconds without work.

    Returns:
      int64[process, event, kind].

    Raises:
      RuntimeError: a process did not end as the last event ends it.
    """
    counts = Counts(count)
    collectives = Collectives(count, counts)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder, f"{index}.out") for index in range(count)]
        arguments = (
            count,
            resolve(load_config(CONFIG)),
            idle,
            f"{folder}/run",
            address,
            counts,
            collectives,
        )
        pids = {
            fork(output, run_process, index, *arguments): index
            for index, output in enumerate(outputs)
        }
        while pids:
            pid, status = os.wait()
            index = pids.pop(pid)
            if os.waitstatus_to_exitcode(status) != 1:
                for other in pids:
                    os.kill(other, signal.SIGKILL)
                break
        if not counts.array[:, list(EVENTS).index("failure"), KINDS.index("requests")].all():
            raise RuntimeError(
                f"process {index} of {count} failed:\n{outputs[index].read_text()[-5000:]}"
            )
    return counts.array


def extrapolate(numbers):
    """Add the number for 1,000 processes to those by number of processes.

    What grows does so in proportion to the processes: each adds as much as between the two largest
      runs.
    """
    low, high = sorted(numbers)[-2:]
    slope = (numbers[high] - numbers[low]) / (high - low)
    return {**numbers, EXTRAPOLATED: round(numbers[high] + slope * (EXTRAPOLATED - high))}


def format_results(measured):
    """Return a table of what the processes have counted.

    Args:
      measured: number of processes -> what each has counted.
    """
    counts = [*measured, EXTRAPOLATED]
    columns = ["event", "requests", "collectives", *(f"bytes, {count:,}" for count in counts)]
    columns += [f"all requests, {count:,}" for count in counts[-2:]] + [
        f"before, {count:,}" for count in counts[-2:]
    ]
    rows = []
    for e, event in enumerate(EVENTS):
        requests, _, collectives, _ = np.max(
            [array[:, e].max(axis=0) for array in measured.values()], axis=0
        )
        size = extrapolate(
            {count: int(array[:, e, 1::2].sum(axis=1).max()) for count, array in measured.items()}
        )
        total = extrapolate({count: int(array[:, e, 0].sum()) for count, array in measured.items()})
        before = [count * (count + 2) if event in EXCHANGES_BEFORE else "" for count in counts[-2:]]
        numbers = [
            requests,
            collectives,
            *size.values(),
            *(total[count] for count in counts[-2:]),
            *before,
        ]
        rows.append([event, *(f"{number:,}" if number != "" else "" for number in numbers)])
    return table(columns, rows)


def main():
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", default="16,64,256", help="numbers of processes, even ones")
    args = parser.parse_args()
    print(
        format_results(
            {int(count): count_requests(int(count)) for count in args.processes.split(",")}
        )
    )


if __name__ == "__main__":
    main()
