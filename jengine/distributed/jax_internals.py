"""Access the private parts of JAX's distributed runtime that have no public equivalent.

No other module imports from `jax._src`, which a JAX release may change without notice. Two things are needed from it:

- The client of the coordination service, whose key-value store works on the host while devices are busy. Orbax and
  flax use the same client.
- Cluster detection without `jax.distributed.initialize`, which keeps the detected address to itself; `launch` needs it
  to wait for all processes and to start the coordinator proxy before it calls `initialize`.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax


class Client(NamedTuple):
    """Describe the connection of this process to the coordination service."""

    store: Any  # a KeyValueStore
    process_id: int
    num_processes: int


def get_client() -> Client | None:
    """Return the client of the coordination service, or None before `jax.distributed.initialize`.

    Raises:
      ImportError: this JAX release has no such client where jengine expects it.
    """
    if not jax.distributed.is_initialized():
        return None
    state = _get("jax._src.distributed", "global_state")
    try:
        return Client(state.client, state.process_id, state.num_processes)
    except AttributeError as error:
        raise _unsupported("jax._src.distributed.global_state") from error


def detect_cluster(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
    method: str | None,
    timeout: int,
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Return the first four arguments, with None replaced by the value that JAX detects, if it detects one.

    Args:
      coordinator: `host:port` of process 0.
      num_processes: number of processes.
      process_id: index of this process.
      local_device_ids: the devices of the host that this process uses.
      method: JAX's name of the detection method; None tries every one.
      timeout: seconds.

    Raises:
      ImportError: this JAX release has no cluster detection where jengine expects it.
    """
    detect = getattr(_get("jax._src.clusters", "ClusterEnv"), "auto_detect_unset_distributed_params", None)
    if detect is None:
        raise _unsupported("jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params")
    return detect(coordinator, num_processes, process_id, local_device_ids, method, timeout)


def _get(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _unsupported(f"{module}.{name}") from error


def _unsupported(name: str) -> ImportError:
    return ImportError(
        f"jengine needs `{name}` to run several processes, but JAX {jax.__version__} does not have it; "
        "install another JAX release, or update jengine/distributed/jax_internals.py"
    )
