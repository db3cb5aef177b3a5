"""Detect that another process of a run has failed or is gone.

A process that fails on the host writes its error to the key-value store of JAX's coordination service before it ends. A
process that is killed writes nothing; it is detected by a roll call when a collective breaks, or by its missing
heartbeats where none does, and the process that detects it writes that to the store. The first entry is the cause that
all processes report: their own collectives break one after the other as others end. A thread reads the store a few
times a second, which also works while the main thread waits on a device for a process that will never come.
"""

import contextlib
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from jengine.distributed.heartbeat import Heartbeat
from jengine.distributed.key_value_store import KeyValueStore

_FAILURE = "jengine/failure"
_ROLL_CALLS = "jengine/roll_calls"
_ANSWERS = "jengine/answers"
_ACKNOWLEDGED = "jengine/acknowledged"
_IDENTITIES = "jengine/identities"
HEARTBEAT_TIMEOUT = 60.0  # seconds; no known extension holds Python's lock for so long
_STATUS = re.compile(r"^(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")


class ProcessError(RuntimeError):
    """Signal that another process of the run is missing or has failed.

    Attributes:
      processes: their indices.
    """

    def __init__(self, message: str, processes: list[int]) -> None:
        super().__init__(message)
        self.processes = processes


class Failure(NamedTuple):
    """Describe why a run ends."""

    by: int  # the process that reports it
    processes: list[int]  # those that failed or are gone
    reason: str  # 'is gone: ...', 'failed: ...'


def describe_this_process() -> str:
    """Return the process id and the host of this process."""
    return f"pid {os.getpid()} on host {socket.gethostname()}"


class FailureDetector:
    """Watch the store for failures of the other processes, in a thread.

    Args:
      store: the client of the coordination service.
      index: index of this process.
      count: number of processes.
      poll: seconds between two reads.
      grace: seconds that an exception has to end this process, after a failure of another, before the thread ends it.
      answer_time: seconds that others have to answer a roll call, each of which they read `poll` seconds later.
      heartbeat_timeout: seconds without a heartbeat after which a process counts as dead; `HEARTBEAT_TIMEOUT` by
        default.

    Attributes:
      on_poll: called in the thread at each read, unless None.
    """

    def __init__(
        self,
        store: KeyValueStore,
        index: int,
        count: int,
        poll: float = 0.2,
        grace: float = 1.0,
        answer_time: float = 1.5,
        heartbeat_timeout: float | None = None,
    ) -> None:
        self.store, self.index, self.count = store, index, count
        self.on_poll: Callable[[], None] | None = None
        self._poll, self._grace, self._answer_time = poll, grace, answer_time
        self._failure: Failure | None = None  # the first one of the run
        self._store_lost = False  # a read would block forever
        self._identities: dict[str, str] = {}
        self._exiting = threading.Event()  # an exception is about to end this process
        self._failure_time: float | None = None  # when the failure was read, by time.monotonic
        self._answered_calls: set[str] = set()
        timeout = HEARTBEAT_TIMEOUT if heartbeat_timeout is None else heartbeat_timeout
        self._heartbeat = Heartbeat(store, index, count, timeout)
        self._last_read = math.inf  # when the store last answered, by time.monotonic
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jengine-failure-detector", daemon=True)
        store.key_value_set(f"{_IDENTITIES}/{index}", describe_this_process(), True)

    @property
    def exiting(self) -> bool:
        """True if an exception is about to end this process."""
        return self._exiting.is_set()

    def start(self) -> None:
        """Start the thread, and a second one except on process 0."""
        self._last_read = time.monotonic()
        self._thread.start()
        if self.index:
            threading.Thread(target=self._watch_store, name="jengine-store-watchdog", daemon=True).start()

    def stop_thread(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread and not self._store_lost:
            self._thread.join(self._grace)

    def stop(self) -> None:
        """Stop detection at the end of the process; end a failed process at once, where JAX would wait for others.

        Process 0, whose end stops the service, waits until the others have read the reason.
        """
        self.stop_thread()
        if not self._exiting.is_set():
            with contextlib.suppress(Exception):
                self._heartbeat.stop()
            return
        if not self._store_lost:
            # The service may have ended with process 0, and a write then blocks until JAX notices it.
            acknowledgement = threading.Thread(target=self._acknowledge_exit, daemon=True)
            acknowledgement.start()
            acknowledgement.join(self._grace)
        if self.index == 0:
            with contextlib.suppress(Exception):
                self._wait_for_acknowledgements()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def report(self, error: BaseException) -> None:
        """Write to the store that this process ends with `error`, so that the others end too."""
        context = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))  # the hook, the iteration
        self._exiting.set()
        self._publish([self.index], f"failed: {type(error).__name__}: {error}{context}"[:2000])

    def raise_failure(self) -> None:
        """Raise the first failure of the run, if there is one that is not an error of this process.

        Raises:
          ProcessError: names the process and its error.
        """
        if self._is_ended_by_others():
            raise self.create_error(self._describe_failure())

    def diagnose(self, error: BaseException) -> None:
        """Raise the cause of an error of JAX's runtime: a collective breaks when another process is gone.

        Raises:
          ProcessError: names the processes that failed or do not answer. Nothing is raised if all are alive, or if
            `error` is of another kind.
        """
        if not (isinstance(error, RuntimeError | ValueError) and _STATUS.match(str(error))):
            return
        if missing := self._call_roll():
            verb = "is" if len(missing) == 1 else "are"
            self._publish(missing, f"{verb} gone: no answer for {self._answer_time:g} s")
        if self._is_ended_by_others():
            raise self.create_error(self._describe_failure()) from error

    def create_error(self, message: str, processes: list[int] | None = None) -> ProcessError:
        """Return a ProcessError that the caller raises; from now on the thread does not end the process."""
        self._exiting.set()
        if processes is None:
            assert self._failure is not None
            processes = self._failure.processes
        return ProcessError(message, processes)

    def handle_lost_service(self, reason: str = "the connection to it broke") -> None:
        """Handle the loss of process 0 and thus of the store; call this from a thread.

        An exception has the grace time to end this process; after it the thread ends the process.

        Args:
          reason: for the error.
        """
        if self._stopped.is_set():  # the run has ended, and the service with it
            return
        self._store_lost = True
        if self._failure is None:
            self._failure = Failure(self.index, [0], f"is gone: {reason}")
        if not self._exiting.wait(self._grace):
            self._end_process()

    def describe(self, process: int) -> str:
        """Return the index, the process id and the host of a process."""
        if str(process) not in self._identities:
            with contextlib.suppress(Exception):
                self._read_identities()
        identity = self._identities.get(str(process))
        return f"process {process}" if identity is None else f"process {process} ({identity})"

    def _describe_failure(self) -> str:
        assert self._failure is not None
        by, processes, reason = self._failure
        text = f"{', '.join(map(self.describe, processes))} {reason}"
        return f"{self.describe(by)} has ended the run: {text}" if self.index in processes else text

    def _is_ended_by_others(self) -> bool:
        """Return whether there is a failure, other than an error of this process."""
        if self._failure is None:
            return False
        return self._failure.by != self.index or self.index not in self._failure.processes

    def _publish(self, processes: list[int], reason: str) -> None:
        """Write a failure to the store, unless another process was first; the first one counts here too."""
        failure = Failure(self.index, processes, reason)
        if not self._store_lost:
            with contextlib.suppress(Exception):  # another process was first, or the service is gone
                self.store.key_value_set(f"{_FAILURE}/first", json.dumps(failure))
            with contextlib.suppress(Exception):
                self._read_failure()
        self._failure = self._failure or failure

    def _run(self) -> None:
        while not self._stopped.wait(self._poll):
            try:
                self._read_store(time.monotonic())
                self._last_read = time.monotonic()
            except Exception:  # the service is gone, and JAX ends this process
                self._last_read = math.inf
                return
            if self._must_end_process():
                self._end_process()

    def _read_store(self, now: float) -> None:
        self._read_identities()  # while the store is available
        self._read_failure()
        self._answer_roll_calls()
        if self._heartbeat.beat(now):
            self._report_missing_heartbeat()
        if (on_poll := self.on_poll) is not None:
            on_poll()

    def _read_identities(self) -> None:
        if len(self._identities) < self.count and not self._store_lost:
            entries = self.store.key_value_dir_get(_IDENTITIES)
            self._identities = {key.rsplit("/", 1)[1]: identity for key, identity in entries}

    def _read_failure(self) -> None:
        if self._failure is None and not self._store_lost:
            for _, text in self.store.key_value_dir_get(_FAILURE):
                self._failure = Failure(*json.loads(text))
                self.store.key_value_set(f"{_ACKNOWLEDGED}/{self.index}", "read", True)

    def _watch_store(self) -> None:
        """Detect, in a second thread, a store that does not answer while the first thread waits for it."""
        timeout = self._heartbeat.timeout
        late_checks = 0
        while late_checks < 2:  # twice: if all threads were held up, the first one may be about to read
            if self._stopped.wait(5 * self._poll):
                return
            late_checks = late_checks + 1 if time.monotonic() - self._last_read > timeout else 0
        self.handle_lost_service(f"no answer for {timeout:g} s")

    def _must_end_process(self) -> bool:
        """Return whether a failure was read a grace time ago and the main thread has not raised it."""
        if self._exiting.is_set() or not self._is_ended_by_others():
            return False
        self._failure_time = self._failure_time or time.monotonic()
        return time.monotonic() > self._failure_time + self._grace

    def _report_missing_heartbeat(self) -> None:
        """Report to all processes that the watched one is gone."""
        if self._failure is None:
            self._publish([self._heartbeat.watched], f"is gone: no heartbeat for {self._heartbeat.timeout:g} s")

    def _answer_roll_calls(self) -> None:
        for key, _ in self.store.key_value_dir_get(_ROLL_CALLS):
            call = key.rsplit("/", 1)[1]
            if call not in self._answered_calls:
                self._answered_calls.add(call)
                self.store.key_value_set(f"{_ANSWERS}/{call}/{self.index}", "alive", True)

    def _call_roll(self) -> list[int]:
        """Return the processes that do not answer in time; process 0, which runs the service, if the store is gone.

        None are missing if a failure is read meanwhile: it is the cause, and its process may not answer any more.
        """
        call = f"{self.index}-{time.time_ns()}"
        start = time.monotonic()
        try:
            self.store.key_value_set(f"{_ROLL_CALLS}/{call}", "called")
            while True:
                self._read_failure()
                if self._failure is not None:
                    return []
                missing, seconds = self._missing(f"{_ANSWERS}/{call}"), time.monotonic() - start
                # Even if all answer, a failed process may not have written its error yet.
                if seconds > (self._answer_time if missing else 2 * self._poll):
                    return missing
                time.sleep(self._poll / 2)
        except Exception:
            return [0]

    def _acknowledge_exit(self) -> None:
        with contextlib.suppress(Exception):
            self.store.key_value_set(f"{_ACKNOWLEDGED}/{self.index}", "exiting", True)

    def _wait_for_acknowledgements(self) -> None:
        """Wait until all live processes have read the failure, or have ended."""
        deadline = time.monotonic() + 2 * self._answer_time
        failed = [] if self._failure is None else self._failure.processes
        while set(self._missing(_ACKNOWLEDGED)) - set(failed) and time.monotonic() < deadline:
            time.sleep(self._poll / 2)

    def _missing(self, key: str) -> list[int]:
        """Return the processes that have no entry below `key`."""
        present = {int(entry.rsplit("/", 1)[1]) for entry, _ in self.store.key_value_dir_get(key)}
        return [process for process in range(self.count) if process not in present]

    def _end_process(self) -> None:
        """End this process, whose main thread waits for another that will never come."""
        print(f"jengine: ProcessError: {self._describe_failure()}", file=sys.stderr)
        self._exiting.set()
        self.stop()
