"""Batches that are built in grain's worker processes."""

import atexit
import concurrent.futures
import faulthandler
import functools
import multiprocessing
import os
import pathlib
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from jengine.config.errors import ConfigError
from jengine.data.batch_prefetcher import list_workers
from jengine.data.batches import BatchSource
from jengine.data.host_entries import Batch
from jengine.logging.watchdog import all_stacks, end_process, stack_sources

_LOOK = 0.5  # seconds between two looks at the processes, while there is no batch
_GRACE = 2.0  # seconds in which the error that a worker has sent may arrive
_STACK_TIME = 2.0  # seconds for a worker to write its stacks


def start_workers(
    source: BatchSource, stop: int, num_workers: int, num_threads: int, prefetch_factor: int
) -> "list[_Worker]":
    """Start a process for each part of the batches; the arguments are as in `BatchPrefetcher`."""
    processes = _Processes(num_workers)
    parts = [slice(worker, stop, num_workers) for worker in range(num_workers)]
    return [_Worker(source, part, num_threads, prefetch_factor, processes) for part in parts]


class WorkerError(RuntimeError):
    """Error of a worker process that has ended before its last batch."""


class _Processes:
    """The worker processes of one loader, which grain starts in threads of its own.

    Args:
      count: how many there will be.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._others = set(list_workers())
        self._own: list[multiprocessing.process.BaseProcess] = []
        self.have_sent = False  # a batch
        self.have_failed = False

    def check(self) -> None:
        """Raise WorkerError if a process has ended."""
        for process in list_workers():
            if len(self._own) < self._count and process not in {*self._others, *self._own}:
                self._own.append(process)
        ended = [process for process in self._own if process.exitcode is not None]
        # With code 0 after the last batch or an error of the dataset, which is on its way
        failed = [process for process in ended if process.exitcode]
        if not failed and len(ended) < self._count:
            return
        self.have_failed = True
        dead = (failed or ended)[0]
        code = dead.exitcode or 0
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += ", as when the memory is full" if code == -signal.SIGKILL else ""
        message = f"the worker process {dead.pid}, which builds batches, {how}"
        if not self.have_sent and _lacks_guard():
            raise WorkerError(f"{message}: it imports the script again, and so {_ADVICE}")
        raise WorkerError(f"{message}; what it printed is above")

    def kill(self) -> None:
        """Kill those that are left."""
        for process in self._own:
            process.kill()


_ADVICE = (
    'what trains must be below `if __name__ == "__main__":` in the script, or num_workers must be 0'
)


def _lacks_guard() -> bool:
    """Return whether the main module is a script that a worker process runs as a whole."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None:
        return False
    try:
        return "__name__" not in pathlib.Path(path).read_text(errors="replace")
    except OSError:
        return False


class _Worker:
    """Grain process that builds the batches `part` ahead, and ends with this process."""

    def __init__(
        self,
        source: BatchSource,
        part: slice,
        num_threads: int,
        prefetch_factor: int,
        processes: _Processes,
    ) -> None:
        import grain

        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise ConfigError(f"a worker process has imported the script: {_ADVICE}")
        parse_flags()
        threads = grain.ReadOptions(num_threads, num_threads * prefetch_factor)
        dataset = grain.MapDataset.source(source)[part].to_iter_dataset(threads)
        # A pipeline of its own for each worker: grain cannot move several workers to another index.
        options = grain.MultiprocessingOptions(1, prefetch_factor)
        start = functools.partial(_start_worker, _stack_directory())
        self._iterator: Any = iter(dataset.mp_prefetch(options, worker_init_fn=start))
        self._processes = processes
        self._tasks: queue.SimpleQueue[Future[Batch] | None] = queue.SimpleQueue()
        threading.Thread(
            target=_pull, args=(self._iterator, self._tasks), name="jengine-worker", daemon=True
        ).start()

    def seek(self, index: int) -> None:
        """Continue at `index` in `part`."""
        import grain

        grain.experimental.set_next_index(self._iterator, index)
        self._iterator.start_prefetch()

    def __next__(self) -> Batch:
        # In a thread, since grain waits for ever for some processes that have ended
        future: Future[Batch] = Future()
        self._tasks.put(future)
        while True:
            done, _ = concurrent.futures.wait([future], _LOOK)
            if not done:
                try:
                    self._processes.check()
                except WorkerError:
                    # the process may have sent its error before it ended
                    if not concurrent.futures.wait([future], _GRACE).done:
                        raise
            if future.done():
                if "Worker process was terminated" in str(future.exception()):
                    self._processes.check()
                batch = future.result()
                self._processes.have_sent = True
                return batch

    def close(self) -> None:
        """End the process."""
        self._tasks.put(None)
        if self._processes.have_failed:  # grain's threads may wait for it for ever
            self._processes.kill()
        else:
            self._iterator.close()


def _pull(iterator: Iterator[Batch], tasks: "queue.SimpleQueue[Future[Batch] | None]") -> None:
    """Take a batch for each task until None arrives."""
    while (future := tasks.get()) is not None:
        try:
            future.set_result(next(iterator))
        except BaseException as error:
            future.set_exception(error)
        del future


def parse_flags() -> None:
    """Mark absl's flags as parsed: grain reads them, and a script without absl never parses
    them.
    """
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


@functools.cache
def _stack_directory() -> str:
    """Return a directory with a file for the stacks of each worker process, by its number."""
    stack_sources.append(_read_stacks)
    directory = tempfile.mkdtemp(prefix="jengine_stacks_")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _read_stacks() -> str:
    """Return the stacks of the worker processes; each writes them on a signal, even if it hangs."""
    stacks = []
    for process in list_workers():
        path = pathlib.Path(_stack_directory(), str(process.pid))
        if process.pid is None or not path.exists():  # it is starting
            continue
        before = size = path.stat().st_size
        os.kill(process.pid, signal.SIGUSR1)
        end = time.monotonic() + _STACK_TIME
        while time.monotonic() < end and (size == before or size != path.stat().st_size):
            size = path.stat().st_size
            time.sleep(0.05)
        text = path.read_bytes()[before:].decode(errors="replace")
        stacks.append(f"Worker process {process.pid}:\n{text or '  no answer'}")
    return "\n".join(stacks)


def _write_stacks(requests: int, path: pathlib.Path) -> None:
    """Append the stacks of this process to a file for each signal that comes."""
    # not by `faulthandler`, which would end the process if a thread starts meanwhile
    while number := os.read(requests, 1):
        if number[0] == signal.SIGUSR1:
            with path.open("a") as file:
                file.write(f"{all_stacks(with_workers=False)}\n")


def _start_worker(directory: str, *_: int) -> None:
    """Let this worker process write its stacks on a signal, print them if native code ends it, and
    end with the parent, also after a kill, which runs no cleanup in the parent.
    """
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):  # Windows has no such signal
        path = pathlib.Path(directory, str(os.getpid()))
        path.touch()
        requests, received = os.pipe()
        os.set_blocking(received, False)
        signal.set_wakeup_fd(received)  # written at once, also if the main thread hangs
        signal.signal(signal.SIGUSR1, lambda *_: None)
        threading.Thread(target=_write_stacks, args=(requests, path), daemon=True).start()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        # A parent that was killed cannot end its workers, which would wait for tasks and hold their
        # memory for ever.
        parent.join()
        end_process(1)

    threading.Thread(target=wait, daemon=True).start()
