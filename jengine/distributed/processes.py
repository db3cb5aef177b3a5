"""Exchange small values between the processes of a run on the host.

Everything goes through the key-value store of JAX's coordination service and uses no device, so it works before the
first compilation and costs the devices nothing.
"""

import atexit
import contextlib
import functools
import json
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from jengine.description import describe
from jengine.distributed.failures import FailureDetector, ProcessError
from jengine.distributed.jax_internals import get_client
from jengine.distributed.key_value_store import KeyValueStore
from jengine.errors import ConfigError

TIMEOUT = 300.0  # seconds; covers the delay between the fastest and the slowest start of a process
_POLL = 1.0  # seconds of waiting between two checks for failures of others
_MISSING = "nothing"


class ProcessMismatchError(ConfigError):
    """Signal, on all processes of a run, that their configs or data differ."""


class SingleProcess:
    """Stand in for `Processes` in a run of one process."""

    index, count = 0, 1
    failure_detector: FailureDetector | None = None
    failing = False

    def all_gather(self, name: str, value: Any, timeout: float | None = None) -> list[Any]:
        """Return the values of all processes."""
        return [value]

    def fail(self, error: BaseException) -> None:
        """Do nothing: there is no other process."""


class Processes:
    """Connect a process to the others of the run.

    Args:
      store: the client of the coordination service.
      index: index of this process.
      count: number of processes.
      timeout: seconds after which a process that has not arrived counts as missing.
      failure_detector: detects failures of the others; created by default.
    """

    def __init__(
        self,
        store: KeyValueStore,
        index: int,
        count: int,
        timeout: float = TIMEOUT,
        failure_detector: FailureDetector | None = None,
    ) -> None:
        self.index, self.count, self.timeout = index, count, timeout
        self.failure_detector = FailureDetector(store, index, count) if failure_detector is None else failure_detector
        self._store = store
        self._round = self._consensus_count = 0

    def all_gather(self, name: str, value: Any, timeout: float | None = None) -> list[Any]:
        """Return the values of all processes in order; every process waits for every other.

        All processes must call it, in the same order.

        Args:
          name: subject of the exchange, for errors.
          value: anything that JSON can hold.
          timeout: seconds; `self.timeout` by default.

        Returns:
          The values, by process.

        Raises:
          ProcessError: a process did not arrive in time, or has failed; the message names it.
        """
        self._round += 1
        prefix = f"jengine/all_gather/{self._round}"
        self._store.key_value_set(f"{prefix}/{self.index}", json.dumps(value))
        timeout = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        values = [json.loads(self._wait(prefix, process, name, timeout, deadline)) for process in range(self.count)]
        # All processes that have arrived here have read the previous round and left the one before it.
        with contextlib.suppress(Exception):
            self._store.key_value_delete(f"jengine/all_gather/{self._round - 2}/{self.index}")
        return values

    def fail(self, error: BaseException) -> None:
        """Report that this process ends with an error, so that the others end too.

        Raises:
          ProcessError: `error` was caused by another process, which the message names.
        """
        if not isinstance(error, ProcessError | ProcessMismatchError):
            self.failure_detector.diagnose(error)
            self.failure_detector.report(error)

    @property
    def failing(self) -> bool:
        """True if this process is about to end with an error, so it must not wait for others."""
        return self.failure_detector.exiting

    def next_consensus_id(self) -> int:
        """Return the number of the next `ShutdownConsensus`, which is the same on all processes."""
        self._consensus_count += 1
        return self._consensus_count

    def create_timeout_error(self, prefix: str, name: str, timeout: float | None = None) -> ProcessError:
        """Return the error of a wait that took too long.

        Args:
          prefix: path in the store below which every process should have set a value.
          name: subject of the wait.
          timeout: its seconds; `self.timeout` by default.
        """
        arrived = {int(key.rsplit("/", 1)[1]) for key, _ in self._store.key_value_dir_get(prefix)}
        missing = [process for process in range(self.count) if process not in arrived]
        return self.failure_detector.create_error(
            f"{', '.join(map(self.failure_detector.describe, missing))} did not reach {name!r} within "
            f"{self.timeout if timeout is None else timeout:g} s; {len(arrived)} of {self.count} processes did",
            missing,
        )

    def _wait(self, prefix: str, process: int, name: str, timeout: float, deadline: float) -> str:
        """Return the text that `process` sets below `prefix`."""
        while True:
            remaining = max(deadline - time.monotonic(), 0.01)
            try:
                milliseconds = int(1000 * min(remaining, _POLL)) or 1
                return self._store.blocking_key_value_get(f"{prefix}/{process}", milliseconds)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self.failure_detector.create_error(
                        f"process 0, on which the others depend, is gone: {error}", [0]
                    ) from error
            self.failure_detector.raise_failure()
            if time.monotonic() >= deadline:
                raise self.create_timeout_error(prefix, name, timeout)


def get_processes() -> SingleProcess | Processes:
    """Return the processes of this run; the same object at each call."""
    client = get_client()
    if client is None or client.num_processes == 1:
        return SingleProcess()
    return _processes(client.store, client.process_id, client.num_processes)


@functools.cache
def _processes(store: Any, index: int, count: int) -> Processes:
    processes = Processes(store, index, count)
    processes.failure_detector.start()
    _exit_after_uncaught_error(processes.failure_detector)
    atexit.register(processes.failure_detector.stop)
    return processes


def _exit_after_uncaught_error(failure_detector: FailureDetector) -> None:
    """End the process as soon as an uncaught error is printed, even if threads still wait for other processes."""
    print_error = sys.excepthook

    def print_and_exit(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        print_error(kind, error, traceback)
        failure_detector.stop()

    sys.excepthook = print_and_exit


def assert_equal_across_processes(processes: SingleProcess | Processes, values: Mapping[str, Any]) -> None:
    """Check that all processes have the same values, for instance the same config.

    Arrays, functions and dtypes are compared by their values too, other objects by their classes: those of a process
    may depend on its index.

    Args:
      processes: the processes of the run.
      values: nested dicts and lists: the config, the numbers of batches, versions.

    Raises:
      ProcessMismatchError: on every process, with the path of the first difference in `values`.
    """
    if processes.count == 1:
        return
    gathered = processes.all_gather("the start", describe(values, shallow=True))
    for process, other in enumerate(gathered):
        difference = first_difference(gathered[0], other)
        if difference is not None:
            path, first, second = difference
            raise ProcessMismatchError(
                f"`{path}` must be the same on all processes, got {first} on process 0 and {second} on process "
                f"{process}; start all of them with the same config and the same command"
            )


def first_difference(one: Any, other: Any, path: str = "") -> tuple[str, str, str] | None:
    """Return the path and the two values at which nested dicts and lists first differ; None if they are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        pairs = [(f"{path}.{key}" if path else key, one.get(key, ...), other.get(key, ...)) for key in keys]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        both_nan = one != one and other != other
        return None if one == other or both_nan else (path, _format(one), _format(other))
    differences = (first_difference(a, b, item_path) for item_path, a, b in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _format(value: Any) -> str:
    return _MISSING if value is ... else repr(value)
