"""Exchange small values between the processes of a run, on the host, and wait for each other.

Everything goes through the key-value store of JAX's coordination service and touches no device, so that it works
before the first compile and costs the devices nothing.
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

from jengine.distributed.failures import FailureDetector, ProcessError
from jengine.distributed.key_value_store import Store
from jengine.errors import ConfigError

TIMEOUT = 300.0  # seconds; covers the delay between the fastest and the slowest start of a process
_SLICE = 1.0  # seconds of waiting between two checks for failures of others
_NOTHING = "nothing"


class ProcessMismatchError(ConfigError):
    """Signal on all processes of a run that they do not run the same thing."""


class SingleProcess:
    """Act as the only process of a run: every value is agreed on."""

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
      index: this process.
      count: number of processes.
      timeout: seconds after which a process that did not come counts as missing.
      failure_detector: detects failures of the others; created by default.
    """

    def __init__(
        self,
        store: Store,
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
        """Return the values of all processes in order; every process waits here for every other.

        All processes call it, in the same order.

        Args:
          name: subject of the exchange, for errors.
          value: anything that JSON can hold.
          timeout: seconds; by default that of the object.

        Returns:
          The values, by process.

        Raises:
          ProcessError: a process did not come in time, or has failed; the message names it.
        """
        self._round += 1
        place = f"jengine/all_gather/{self._round}"
        self._store.key_value_set(f"{place}/{self.index}", json.dumps(value))
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        values = [json.loads(self._wait(place, process, name, limit, deadline)) for process in range(self.count)]
        with contextlib.suppress(Exception):  # all that came here have read the last round, and left the one before
            self._store.key_value_delete(f"jengine/all_gather/{self._round - 2}/{self.index}")
        return values

    def fail(self, error: BaseException) -> None:
        """Call when this process ends with an error, so that all do.

        Raises:
          ProcessError: `error` was caused by another process, which the message names.
        """
        if not isinstance(error, ProcessError | ProcessMismatchError):
            self.failure_detector.diagnose(error)
            self.failure_detector.report(error)

    @property
    def failing(self) -> bool:
        """True if this process is about to end with an error, so that waiting for others is useless."""
        return self.failure_detector.ending

    def new_consensus(self) -> int:
        """Return the number of the next `ShutdownConsensus`: the same on all processes."""
        self._consensus_count += 1
        return self._consensus_count

    def late(self, place: str, name: str, limit: float | None = None) -> ProcessError:
        """Return the error of a wait that took too long.

        Args:
          place: path in the store at which every process should have put a value.
          name: subject of the wait.
          limit: its seconds; by default those of the object.
        """
        there = {int(key.rsplit("/", 1)[1]) for key, _ in self._store.key_value_dir_get(place)}
        missing = [process for process in range(self.count) if process not in there]
        return self.failure_detector.error(
            f"{', '.join(map(self.failure_detector.name, missing))} did not come to {name!r} within "
            f"{self.timeout if limit is None else limit:g} s; {len(there)} of {self.count} processes did",
            missing,
        )

    def _wait(self, place: str, process: int, name: str, limit: float, deadline: float) -> str:
        """Return the text that `process` puts at `place`."""
        while True:
            left = max(deadline - time.monotonic(), 0.01)
            try:
                return self._store.blocking_key_value_get(f"{place}/{process}", int(1000 * min(left, _SLICE)) or 1)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self.failure_detector.error(
                        f"process 0, on which the others depend, is gone: {error}", [0]
                    ) from error
            self.failure_detector.raise_failure()
            if time.monotonic() >= deadline:
                raise self.late(place, name, limit)


def get_processes() -> SingleProcess | Processes:
    """Return the processes of this run; the same object at each call."""
    # There is no public access to the client; orbax and flax use the same one.
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return SingleProcess()
    return _processes(state.client, state.process_id, state.num_processes)


@functools.cache
def _processes(client: Any, index: int, count: int) -> Processes:
    processes = Processes(client, index, count)
    processes.failure_detector.start()
    _leave_after_errors(processes.failure_detector)
    atexit.register(processes.failure_detector.stop)
    return processes


def _leave_after_errors(failure_detector: FailureDetector) -> None:
    """End the process as soon as an uncaught error is printed, although threads still wait for other processes."""
    print_error = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        print_error(kind, error, traceback)
        failure_detector.stop()

    sys.excepthook = leave


def assert_equal_across_processes(processes: SingleProcess | Processes, facts: Mapping[str, Any]) -> None:
    """Check that all processes run the same thing.

    Args:
      processes: those of the run.
      facts: nested dicts and lists: the config, the numbers of batches, versions.

    Raises:
      ProcessMismatchError: on every process, with the first difference by its path in `facts`.
    """
    mine = _plain(facts)
    everyone = processes.all_gather("the start", mine)
    for process, other in enumerate(everyone):
        found = first_difference(everyone[0], other)
        if found is not None:
            place, first, second = found
            raise ProcessMismatchError(
                f"the processes differ at `{place}`: {first} on process 0, {second} on process {process}; "
                "start all of them with the same config and the same command"
            )


def first_difference(one: Any, other: Any, place: str = "") -> tuple[str, str, str] | None:
    """Return the path and the two values at which nested dicts and lists first differ; None where they are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        pairs = [(f"{place}.{key}" if place else key, one.get(key, ...), other.get(key, ...)) for key in keys]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        both_nan = one != one and other != other
        return None if one == other or both_nan else (place, _shown(one), _shown(other))
    return next((found for where, a, b in pairs if (found := first_difference(a, b, where))), None)


def _shown(value: Any) -> str:
    return _NOTHING if value is ... else repr(value)


def _plain(value: Any) -> Any:
    """Return `value` as JSON holds it; an object, whose text contains its address, by the name of its type."""
    if hasattr(value, "items") and not isinstance(value, type):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"<{named.__module__}.{named.__qualname__}>"
