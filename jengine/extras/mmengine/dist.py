"""Functions with the names and arguments from `mmengine.dist`, over the JAX processes.

Values are pickled and exchanged through the devices, so every process must call a function, in the
same order. The compiled step needs none: arrays are global there.
"""

import functools
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from jengine.config.errors import ConfigError
from jengine.parallel.processes import get_processes, to_host

F = TypeVar("F", bound=Callable[..., Any])
Op = Literal["sum", "mean", "min", "max", "product"]
_OPS: dict[str, Any] = {
    "sum": np.sum,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "product": np.prod,
}


def get_rank() -> int:
    """Return this process's index."""
    return get_processes().index


def get_world_size() -> int:
    """Return the process count; each may have several devices."""
    return get_processes().count


def get_dist_info() -> tuple[int, int]:
    """Return this process's index, and the process count.

    >>> get_dist_info()
    (0, 1)
    """
    return get_rank(), get_world_size()


def is_distributed() -> bool:
    """Return whether there are several processes."""
    return get_world_size() > 1


def is_main_process() -> bool:
    """Return whether this is process 0, which writes logs."""
    return get_rank() == 0


def master_only(function: F) -> F:
    """Decorate a function such that only process 0 calls it; the others get None."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if is_main_process() else None

    return call  # type: ignore[return-value]


def barrier() -> None:
    """Wait until all processes are here."""
    get_processes().all_gather("dist.barrier", None)


def all_gather_object(data: Any) -> list[Any]:
    """Return the objects from all processes, in order.

    >>> all_gather_object({"score": 1})
    [{'score': 1}]
    """
    return get_processes().all_gather("dist.all_gather_object", to_host(data))


def gather_object(data: Any, dst: int = 0) -> list[Any] | None:
    """Return the objects from all processes on the process `dst`, and None on the others."""
    gathered = all_gather_object(data)
    return gathered if get_rank() == dst else None


def broadcast_object_list(data: list[Any], src: int = 0) -> None:
    """Replace the items in the list `data` by those from the process `src`."""
    data[:] = get_processes().broadcast("dist.broadcast_object_list", to_host(data), src)


def collect_results(
    results: list[Any], size: int, device: str = "cpu", tmpdir: str | None = None
) -> list[Any] | None:
    """Return the results from all processes in data set order on process 0, and None on the others.

    >>> collect_results(["a", "b", "padding"], size=2)
    ['a', 'b']

    Args:
      results: results from this process, which has the examples `rank`, `rank + world_size` and so
        on.
      size: how many examples there are; what the last processes have beyond it is padding.
      device, tmpdir: MMEngine's transport settings, without a meaning here.
    """
    parts = all_gather_object(results)
    if not is_main_process():
        return None
    longest = max(map(len, parts))
    # taken in turn
    return [part[i] for i in range(longest) for part in parts if i < len(part)][:size]


def sync_random_seed() -> int:
    """Return a random seed, the same on all processes."""
    return int(get_processes().broadcast("dist.sync_random_seed", secrets.randbelow(2**31)))


def all_gather(data: jax.typing.ArrayLike) -> list[np.ndarray]:
    """Return the arrays from all processes, in order."""
    return [np.asarray(each) for each in all_gather_object(np.asarray(data))]


def all_reduce(data: jax.typing.ArrayLike, op: Op = "sum") -> np.ndarray:
    """Return the arrays from all processes combined; unlike MMEngine's, `data` does not change.

    >>> all_reduce(np.array([1.0, 2.0]), "mean").tolist()
    [1.0, 2.0]
    """
    if op not in _OPS:
        raise ConfigError(f"`op` must be one of {', '.join(map(repr, _OPS))}, got {op!r}")
    return np.asarray(_OPS[op](all_gather(data), axis=0))


def all_reduce_dict(
    data: Mapping[str, jax.typing.ArrayLike], op: Op = "sum"
) -> dict[str, np.ndarray]:
    """Return a dict with each array combined over all processes."""
    return {name: all_reduce(value, op) for name, value in sorted(data.items())}


def broadcast(data: jax.typing.ArrayLike, src: int = 0) -> np.ndarray:
    """Return the array from the process `src`; unlike MMEngine's, `data` does not change."""
    return np.asarray(get_processes().broadcast("dist.broadcast", np.asarray(data), src))
