"""Exchange of small values between processes, with JAX's collectives."""

import contextlib
import functools
import importlib
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from jengine.config.description import describe, flatten_description, hash_text
from jengine.config.errors import ConfigError
from jengine.config.json_codec import encode
from jengine.parallel.failures import FailureWatch, ProcessError

_CHUNK_SIZE = 2**20  # bytes; each device holds one chunk of every process
_MIN_SIZE = 2**7  # bytes; few sizes mean few programs, and a header has this one
# of the client of JAX's coordination service
_CALLS = (
    "blocking_key_value_get",
    "key_value_delete",
    "key_value_dir_get",
    "key_value_increment",
    "key_value_set",
    "key_value_try_get",
    "wait_at_barrier",
)
_HEADER = struct.Struct("<120sQ")  # the subject of an exchange, and the number of bytes


class ProcessMismatchError(ConfigError):
    """Error of processes with different configs or data, raised on all of them."""


class SingleProcess:
    """Replacement for `Processes` when there is only one process.

    >>> SingleProcess().all_gather("a value", 3)
    [3]
    """

    index = 0
    count = 1
    failing = False
    agree_on_signals = True
    subject = ""

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes."""
        return [value]

    def broadcast(self, name: str, value: Any, source: int = 0) -> Any:
        """Return the value from the process `source`."""
        return value

    def reached_sync_point(self) -> bool:
        """Return False: there is no other process that could have received a signal."""
        return False

    def fail(self, error: BaseException) -> None:
        """Do nothing: there is no other process."""


class Processes:
    """Communication with the other processes.

    All should call the methods in the same order, from the main thread.

    Args:
      watch: watches for failures of the others.

    Attributes:
      subject: of the exchange that runs; empty for none.
    """

    def __init__(self, watch: FailureWatch) -> None:
        self.index = jax.process_index()
        self.count = jax.process_count()
        self.subject = ""
        self._watch = watch
        self._rounds = 0

    @property
    def agree_on_signals(self) -> bool:
        """Whether JAX's preemption service runs, without which a signal ends this process alone,
        and at once.
        """
        return bool(jax.config.values["jax_enable_preemption_service"])

    @property
    def failing(self) -> bool:
        """True if this process is about to end with an error, so it must not wait for others."""
        return self._watch.failing

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes in order; every process waits for every other.

        Args:
          name: subject of the exchange, which must be the same on all processes.
          value: any object that can be pickled.

        Raises:
          ProcessError: the processes exchange different things.
        """
        data = pickle.dumps(value)
        # arrays in a collective must have equal shapes
        sizes = self._exchange_sizes(name, len(data))
        rows = _exchange(multihost_utils.process_allgather, data, max(sizes))
        self.subject = ""
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, name: str, value: Any, source: int = 0) -> Any:
        """Return the value from the process `source`, the only one that pickles it.

        For the rest, see `all_gather`.

        Unlike there, what a process receives does not grow with the number of processes.
        """
        data = pickle.dumps(value) if self.index == source else b""
        size = self._exchange_sizes(name, len(data))[source]
        send = functools.partial(
            multihost_utils.broadcast_one_to_all, is_source=self.index == source
        )
        received = _exchange(send, data, size)[:size].tobytes()
        self.subject = ""
        return pickle.loads(received)

    def _exchange_sizes(self, name: str, size: int) -> list[int]:
        """Return each process's size, after a check that all exchange the same subject."""
        self.subject = name
        header = np.frombuffer(_HEADER.pack(name.encode(), size), np.uint8)
        headers = [
            _HEADER.unpack(row.tobytes()) for row in multihost_utils.process_allgather(header)
        ]
        names = [encoded.rstrip(b"\0").decode(errors="replace") for encoded, _ in headers]
        for process, other in enumerate(names):
            if other != names[0]:
                raise ProcessError(
                    f"all processes must exchange the same values, got {names[0]!r} on process 0 "
                    f"and {other!r} "
                    f"on process {process}: they have taken different ways through the run"
                )
        return [other for _, other in headers]

    def reached_sync_point(self) -> bool:
        """Return whether all processes end at this round in the loop, because one of them received
        SIGTERM.

        JAX's preemption service agrees on the round in the background; see
        `jax.experimental.multihost_utils.reached_preemption_sync_point`.
        """
        self._rounds += 1
        return self.agree_on_signals and multihost_utils.reached_preemption_sync_point(self._rounds)

    def fail(self, error: BaseException) -> None:
        """Report that this process ends with an error, so the others end too."""
        # those are raised on all processes
        if not isinstance(error, ProcessError | ProcessMismatchError):
            self._watch.fail(error)


ProcessGroup: TypeAlias = SingleProcess | Processes


def get_processes() -> ProcessGroup:
    """Return the processes that train together.

    The same object at each call if there are several.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return SingleProcess()
    return _connect(get_client())


@functools.cache
def _connect(client: Any) -> Processes:
    watch = FailureWatch(client, jax.process_index())
    watch.start()  # once per connection: this function is cached
    return Processes(watch)


def get_client() -> Any:
    """Return the coordination service's client. JAX has no public access to it.

    Orbax and flax use it too.

    Raises:
      ProcessError: this version of JAX has another client, or has it elsewhere.
    """
    client = None
    with contextlib.suppress(ImportError, AttributeError):
        client = importlib.import_module("jax._src.distributed").global_state.client
    # Here: a watch for failures would take a call that fails for the end of the run
    if missing := [name for name in _CALLS if not hasattr(client, name)]:
        raise ProcessError(
            "several processes need the client of JAX's coordination service, "
            f"`jax._src.distributed.global_state.client` with `{missing[0]}`, which jax "
            f"{jax.__version__} has not; install the version in docs/install.md, or use one process"
        )
    return client


def _exchange(
    collective: Callable[[np.ndarray], np.ndarray], data: bytes, longest: int
) -> np.ndarray:
    """Return a collective's result for bytes that are padded to a common size, in chunks through
    the devices.
    """
    size = min(_CHUNK_SIZE, max(_MIN_SIZE, 1 << (longest - 1).bit_length()))
    padded = np.frombuffer(data.ljust(-(-longest // size) * size, b"\0"), np.uint8)
    return np.concatenate(
        [collective(padded[i : i + size]) for i in range(0, len(padded), size)], axis=-1
    )


def all_gather_objects(values: list[Any], name: str, processes: ProcessGroup) -> list[Any]:
    """Join the lists from all processes into one, in process order; all of them must call it.

    Args:
      values: objects that can be pickled; they arrive with the same types and bits, JAX arrays as
        NumPy arrays.
      name: the metric or hook that they belong to, for errors.
      processes: see `get_processes`; a single one gets `values` itself.

    Raises:
      Exception: of pickle, for a value that it cannot store.

    >>> all_gather_objects([1, 2], "scores", SingleProcess())
    [1, 2]
    """
    if processes.count == 1:
        return values
    return [value for part in processes.all_gather(name, to_host(values)) for value in part]


def to_host(tree: Any) -> Any:
    """Return the tree with NumPy arrays in place of JAX arrays: a device of another process does
    not exist here.
    """
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, tree)


def put_whole(array: jax.typing.ArrayLike, sharding: jax.sharding.Sharding) -> jax.Array:
    """Place an array that each process has as a whole, or that is on the devices of all already.

    `jax.device_put` would compare the values of the processes, with a collective for each array,
    and a NaN is not equal to itself there.
    """
    is_global = isinstance(array, jax.Array) and not array.is_fully_addressable
    if sharding.is_fully_addressable or is_global:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def assert_equal_across_processes(processes: ProcessGroup, values: Mapping[str, Any]) -> None:
    """Check that all processes have the same values, for instance the same config.

    The processes compare hashes, and send values only to name a difference. Arrays are compared by
    value too, and objects as `describe` returns them.

    Args:
      processes: see `get_processes`.
      values: nested dicts and lists: the config, batch counts, versions.

    Raises:
      ProcessMismatchError: on every process, with the path of the first difference in `values`.
    """
    if processes.count == 1:
        return
    plain = flatten_description(describe(values))
    hashes = processes.all_gather("a hash", hash_text(encode(plain, sort_keys=True)))
    # the first process with each hash
    holders = sorted({hashes.index(other) for other in set(hashes)})
    expected = processes.broadcast("the values of process 0", plain) if len(holders) > 1 else plain
    for process in holders[1:]:
        other = processes.broadcast("the values that differ", plain, process)
        for path in {**expected, **other}:
            first, second = (
                repr(side[path]) if path in side else "nothing" for side in (expected, other)
            )
            if first == second:
                continue
            raise ProcessMismatchError(
                f"`{path}` must be the same on all processes, got {first} on process 0 and "
                f"{second} on process "
                f"{process}; start all of them with the same config and the same command"
            )
