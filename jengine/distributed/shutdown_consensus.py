"""Let all processes end at the same point of their loops when one of them receives a request to end.

A signal reaches processes at different moments, or one of them only, and the processes are not at the same iteration
when it does. Consensus needs no messages from the training loop: a request goes into the key-value store; the thread of
each process that reads it answers with the next point that its loop has not yet passed, and the loop does not pass that
point before all have answered; all end at the latest of these points. A thread gives the answer, so that it comes also
while the main thread waits for a device, and thus for the other processes.
"""

import contextlib
import json
import threading
import time
from typing import Any

from jengine.distributed.processes import Processes, SingleProcess


class ShutdownConsensus:
    """Count the points of a loop, and find the one at which all processes end.

    All processes create and enter their consensus objects in the same order, and pass the same points.

    Args:
      processes: those of the run.
    """

    def __init__(self, processes: SingleProcess | Processes) -> None:
        self._processes = processes
        self._changed = threading.Condition()
        self._asked = False
        self._begin()

    def __enter__(self) -> "ShutdownConsensus":
        if isinstance(self._processes, Processes):
            self._begin()
            self._place = f"jengine/consensus/{self._processes.new_consensus()}"
            self._processes.failure_detector.watcher = self._poll
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Wait for the others after a loop that came to its end: one of them may still need an answer."""
        detector = self._processes.failure_detector
        if detector is not None:
            if kind is None:
                self._processes.all_gather("the end of training", self._points)
            detector.watcher = None

    @property
    def is_shared(self) -> bool:
        """True if there are several processes."""
        return self._processes.failure_detector is not None

    def check(self, request: int | None) -> int | None:
        """Pass one point of the loop.

        Args:
          request: the reason for this process to end, if there is one.

        Returns:
          The request of the first process that had one, at the point where all end; otherwise None.

        Raises:
          ProcessError: another process has failed, or did not answer in time.
        """
        detector = self._processes.failure_detector
        if detector is None:
            return request
        if request is not None and not self._asked:
            self._asked = True
            with contextlib.suppress(Exception):  # another process was first
                detector.store.key_value_set(f"{self._place}/request/first", json.dumps(request))
        detector.raise_failure()
        with self._changed:
            self._points += 1
            if self._limit is not None and self._points >= self._limit:
                self._wait_for_answers()
            return self._request if self._end is not None and self._points >= self._end else None

    def _begin(self) -> None:
        self._points = 0  # passed so far
        self._asked = False
        self._request: int | None = None
        self._limit: int | None = None  # this process's answer
        self._end: int | None = None  # the latest of all answers

    def _poll(self) -> None:
        """Check for requests and answers, in the thread, a few times a second."""
        detector = self._processes.failure_detector
        assert detector is not None
        if self._end is not None:
            return
        if self._limit is None:
            found = detector.store.key_value_dir_get(f"{self._place}/request")
            if not found:
                return
            with self._changed:
                self._request = json.loads(found[0][1])
                self._limit = self._points + 1
            detector.store.key_value_set(f"{self._place}/answers/{self._processes.index}", str(self._limit), True)
        answers = detector.store.key_value_dir_get(f"{self._place}/answers")
        if len(answers) == self._processes.count:
            with self._changed:
                self._end = max(int(point) for _, point in answers)
                self._changed.notify_all()

    def _wait_for_answers(self) -> None:
        detector = self._processes.failure_detector
        assert detector is not None
        assert isinstance(self._processes, Processes)
        deadline = time.monotonic() + self._processes.timeout
        while not self._changed.wait_for(lambda: self._end is not None, timeout=1.0):
            detector.raise_failure()
            if time.monotonic() > deadline:
                raise self._processes.late(f"{self._place}/answers", "the end that a signal asks for")
