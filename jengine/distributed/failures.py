"""Detect that another process of a run has failed or is gone.

A process that fails on the host writes a note to the key-value store of JAX's coordination service before it ends; one
that is killed writes none, and is found by a roll call when a collective breaks, or by its silence where none does. A
thread reads the store a few times a second, so that this works while the main thread waits on a device for a process
that will never come.
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
from collections.abc import Callable, Sequence
from typing import Any

from jengine.distributed.heartbeat import Pulse
from jengine.distributed.key_value_store import Store

_FAILURE = "jengine/failure"
_ROLL_CALL = "jengine/roll_call"
_ANSWERS = "jengine/answers"
_LEFT = "jengine/left"
_WHO = "jengine/who"
SILENCE = 60.0  # seconds; no known extension holds Python's lock for so long
_STATUS = re.compile(r"^(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")


class ProcessError(RuntimeError):
    """Signal that another process of the run is missing or has failed.

    Attributes:
      processes: their indices.
    """

    def __init__(self, message: str, processes: list[int]) -> None:
        super().__init__(message)
        self.processes = processes


class FailureDetector:
    """Read the store, in a thread, for failures of the other processes.

    Args:
      store: the client of the coordination service.
      index: this process.
      count: number of processes.
      poll: seconds between two reads.
      grace: seconds that others have to answer a roll call, and that an error has to end this process in Python
        before it is ended from the thread.
      silence: seconds without a sign of life after which a process is gone; `SILENCE` by default.

    Attributes:
      watcher: called in the thread at each read; None for nothing.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        count: int,
        poll: float = 0.2,
        grace: float = 5.0,
        silence: float | None = None,
    ) -> None:
        self.store, self.index, self.count = store, index, count
        self.watcher: Callable[[], None] | None = None
        self._poll, self._grace = poll, grace
        self._failure: dict[str, Any] | None = None  # of the first process to fail
        self._cut = False  # the store is gone: a read would wait for ever
        self._gone: list[int] = []  # processes that are not to be waited for
        self._names: dict[str, str] = {}
        self._ending = threading.Event()  # an error is on its way up in Python
        self._noticed: float | None = None  # when a failure was read, on the clock of time.monotonic
        self._answered: set[str] = set()
        self._pulse = Pulse(store, index, count, SILENCE if silence is None else silence)
        self._looked = math.inf  # when the store last answered, on the clock of time.monotonic
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jengine-processes", daemon=True)
        store.key_value_set(f"{_WHO}/{index}", f"pid {os.getpid()} on host {socket.gethostname()}", True)

    @property
    def ending(self) -> bool:
        """True if an error is about to end this process."""
        return self._ending.is_set()

    def start(self) -> None:
        """Start the thread, and a second one unless this is process 0."""
        self._looked = time.monotonic()
        self._thread.start()
        if self.index:
            threading.Thread(target=self._await_answers, name="jengine-service", daemon=True).start()

    def stop_thread(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread and not self._cut:
            self._thread.join(self._grace)

    def stop(self) -> None:
        """End detection at the end of the process; end a failed one at once, where JAX would wait for others.

        Process 0, with which the service ends, waits until the others have read the reason.
        """
        self.stop_thread()
        if not self._ending.is_set():
            with contextlib.suppress(Exception):
                self._pulse.stop()
            return
        with contextlib.suppress(Exception):
            if not self._cut:
                self.store.key_value_set(f"{_LEFT}/{self.index}", "left", True)
            if self.index == 0:
                self._wait_for_all(_LEFT, 2 * self._grace, without=self._gone)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def report(self, error: BaseException) -> None:
        """Write to the store that this process ends with `error`, so that the others end too."""
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))  # the hook, the iteration
        told = {"process": self.index, "what": f"failed: {type(error).__name__}: {error}{where}"[:2000]}
        self._ending.set()
        if self._cut:
            return
        with contextlib.suppress(Exception):  # another one was first, or the service is gone
            self.store.key_value_set(f"{_FAILURE}/first", json.dumps(told))
            self._failure = told

    def raise_failure(self) -> None:
        """Raise the failure of another process, if there is one.

        Raises:
          ProcessError: names the process and its error.
        """
        if self._failure is not None and self._failure["process"] != self.index:
            raise self.error(self._story())

    def diagnose(self, error: BaseException) -> None:
        """Raise the cause of an error of JAX's runtime: a collective breaks when another process is gone.

        Raises:
          ProcessError: names the processes that failed or do not answer. Nothing is raised if all are well, or if
            `error` is of another kind.
        """
        if not (isinstance(error, RuntimeError | ValueError) and _STATUS.match(str(error))):
            return
        with contextlib.suppress(Exception):
            time.sleep(2 * self._poll)  # a note may be on its way
            self._note_failure()
        self.raise_failure()
        self._gone = missing = self._roll_call()
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            names = ", ".join(map(self.name, missing))
            raise self.error(f"{names} {verb} gone: no answer for {self._grace:g} s", missing) from error

    def error(self, message: str, processes: list[int] | None = None) -> ProcessError:
        """Return a ProcessError to raise at once: the thread no longer ends the process."""
        self._ending.set()
        if processes is None:
            assert self._failure is not None
            processes = [self._failure["process"]]
        return ProcessError(message, processes)

    def lose_service(self, why: str = "the connection to it broke") -> None:
        """Handle the loss of process 0, and with it the store; call it from a thread.

        It leaves Python some time to end this process with an error, and then ends it.

        Args:
          why: for the error.
        """
        if self._stopped.is_set():  # the run has ended, and the service with it
            return
        self._cut = True
        if self._failure is None:
            self._failure = {"process": 0, "what": f"is gone: {why}"}
        if not self._ending.wait(self._grace):
            self._end_process()

    def name(self, process: int) -> str:
        """Return the index, the process id and the host of a process."""
        if str(process) not in self._names:
            with contextlib.suppress(Exception):
                self._learn_names()
        who = self._names.get(str(process))
        return f"process {process}" if who is None else f"process {process} ({who})"

    def _learn_names(self) -> None:
        if len(self._names) < self.count and not self._cut:
            self._names = {key.rsplit("/", 1)[1]: who for key, who in self.store.key_value_dir_get(_WHO)}

    def _story(self) -> str:
        assert self._failure is not None
        return f"{self.name(self._failure['process'])} {self._failure['what']}"

    def _run(self) -> None:
        while not self._stopped.wait(self._poll):
            try:
                self._look(time.monotonic())
                self._looked = time.monotonic()
            except Exception:  # the service is gone, and JAX ends this process
                self._looked = math.inf
                return
            if self._overdue():
                self._end_process()

    def _look(self, now: float) -> None:
        self._learn_names()  # while the store is available
        self._note_failure()
        self._answer_roll_calls()
        if self._pulse.beat(now):
            self._note_silence()
        if (watcher := self.watcher) is not None:
            watcher()

    def _await_answers(self) -> None:
        """Detect, in a second thread, a store that does not answer, for which the first thread waits."""
        overdue = 0
        while overdue < 2:  # twice: when all threads were held up, the other one may be about to read
            if self._stopped.wait(5 * self._poll):
                return
            silent = time.monotonic() - self._looked > self._pulse.silence
            overdue = overdue + 1 if silent else 0
        self.lose_service(f"no answer for {self._pulse.silence:g} s")

    def _overdue(self) -> bool:
        """Return whether another process failed a grace time ago and the main thread has not raised it."""
        if self._failure is None or self._failure["process"] == self.index or self._ending.is_set():
            return False
        self._noticed = self._noticed or time.monotonic()
        return time.monotonic() > self._noticed + self._grace

    def _note_failure(self) -> None:
        if self._failure is None and not self._cut:
            for _, text in self.store.key_value_dir_get(_FAILURE):
                self._failure = json.loads(text)

    def _note_silence(self) -> None:
        """Report to all that the next process is gone."""
        if self._failure is None:
            self._gone = [self._pulse.next]
            told = {"process": self._pulse.next, "what": f"is gone: no sign of life for {self._pulse.silence:g} s"}
            with contextlib.suppress(Exception):  # another one was first
                self.store.key_value_set(f"{_FAILURE}/first", json.dumps(told))
            self._failure = told

    def _answer_roll_calls(self) -> None:
        for key, _ in self.store.key_value_dir_get(_ROLL_CALL):
            call = key.rsplit("/", 1)[1]
            if call not in self._answered:
                self._answered.add(call)
                self.store.key_value_set(f"{_ANSWERS}/{call}/{self.index}", "here", True)

    def _roll_call(self) -> list[int]:
        """Return the processes that do not answer in time; process 0, which runs the service, if the store is gone."""
        call = f"{self.index}-{time.time_ns()}"
        try:
            self.store.key_value_set(f"{_ROLL_CALL}/{call}", "who is here?")
            return self._wait_for_all(f"{_ANSWERS}/{call}", self._grace)
        except Exception:
            return [0]

    def _wait_for_all(self, place: str, seconds: float, without: Sequence[int] = ()) -> list[int]:
        """Return the processes without an entry at `place` when the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            there = {int(key.rsplit("/", 1)[1]) for key, _ in self.store.key_value_dir_get(place)}
            missing = [process for process in range(self.count) if process not in there and process not in without]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(self._poll)

    def _end_process(self) -> None:
        """End this process, whose main thread waits for another that will never come."""
        print(f"jengine: ProcessError: {self._story()}", file=sys.stderr)
        self._ending.set()
        self.stop()
