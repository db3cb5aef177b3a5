"""End all processes at the same point of their loops when one of them receives a request to end.

A signal reaches processes at different moments, or reaches only one of them, and they are not at the same iteration
then. Consensus needs no messages from the training loop: a request is written to the key-value store; the thread of
each process reads it and answers with the next point that its loop has not passed yet, and the loop does not pass that
point before all have answered; all end at the latest of these points. The answer comes from a thread, so it also comes
while the main thread waits for a device, and thus for the other processes.
"""

import contextlib
import json
import threading
import time
from typing import Any

from jengine.distributed.processes import Processes, SingleProcess


class ShutdownConsensus:
    """Count the points that a loop passes, and find the one at which all processes end.

    All processes create and enter their consensus objects in the same order, and pass the same points.

    Args:
      processes: the processes of the run.
    """

    def __init__(self, processes: SingleProcess | Processes) -> None:
        self._processes = processes
        self._changed = threading.Condition()
        self._requested = False
        self._reset()

    def __enter__(self) -> "ShutdownConsensus":
        if isinstance(self._processes, Processes):
            self._reset()
            self._prefix = f"jengine/consensus/{self._processes.next_consensus_id()}"
            self._processes.failure_detector.on_poll = self._poll
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Wait for the others after a loop that ended normally: one of them may still need an answer."""
        detector = self._processes.failure_detector
        if detector is not None:
            if kind is None:
                self._processes.all_gather("the end of training", self._points)
            detector.on_poll = None

    @property
    def is_shared(self) -> bool:
        """True if there are several processes."""
        return self._processes.failure_detector is not None

    def check(self, request: int | None) -> int | None:
        """Pass one point of the loop.

        Args:
          request: the signal number if this process has to end, otherwise None.

        Returns:
          The request of the first process that had one, at the point where all end; otherwise None.

        Raises:
          ProcessError: another process has failed, or has not answered in time.
        """
        detector = self._processes.failure_detector
        if detector is None:
            return request
        if request is not None and not self._requested:
            self._requested = True
            with contextlib.suppress(Exception):  # another process was first
                detector.store.key_value_set(f"{self._prefix}/request/first", json.dumps(request))
        detector.raise_failure()
        with self._changed:
            self._points += 1
            if self._answer is not None and self._points >= self._answer:
                self._wait_for_answers()
            return self._request if self._end is not None and self._points >= self._end else None

    def _reset(self) -> None:
        self._points = 0  # number of points passed
        self._requested = False
        self._request: int | None = None
        self._answer: int | None = None  # of this process
        self._end: int | None = None  # the latest answer of all processes

    def _poll(self) -> None:
        """Read requests and answers; called a few times a second by the thread of the failure detector."""
        detector = self._processes.failure_detector
        assert detector is not None
        if self._end is not None:
            return
        if self._answer is None:
            requests = detector.store.key_value_dir_get(f"{self._prefix}/request")
            if not requests:
                return
            with self._changed:
                self._request = json.loads(requests[0][1])
                self._answer = self._points + 1
            detector.store.key_value_set(f"{self._prefix}/answers/{self._processes.index}", str(self._answer), True)
        answers = detector.store.key_value_dir_get(f"{self._prefix}/answers")
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
                raise self._processes.create_timeout_error(f"{self._prefix}/answers", "the end requested by a signal")
