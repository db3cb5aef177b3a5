"""The examples of a batch with which a step fails, found by halves."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.data.batch_check import Batch
from jengine.data.host_entries import select_arrays
from jengine.data.loader import DataLoader
from jengine.data.masking import get_mask
from jengine.parallel.local_batch import process_local_batch
from jengine.parallel.processes import put_whole

_MOST = 16  # a fault of all examples is none of an example


def find_examples(fails: Callable[[Batch], bool], batch: Batch) -> list[int]:
    """Return the indices of the examples with which alone a step fails, at most 16.

    >>> find_examples(lambda batch: bool(np.isnan(batch).any()), np.array([0.0, np.nan, 1.0]))
    [1]

    Args:
      fails: whether a step fails on a batch of the same shapes. The batch has one example, or some,
        again and again.
      batch: has the axis of examples first, real[B, ...].
    """
    leaves = jax.tree.leaves(batch)
    size = next((np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)), 0)
    mask = get_mask(batch)
    rows = np.arange(size) if mask is None else np.flatnonzero(fetch(mask))

    def search(rows: np.ndarray, found: list[int]) -> None:
        if len(found) >= _MOST or not len(rows) or not fails(_take(batch, rows, size)):
            return
        if len(rows) == 1:
            found.append(int(rows[0]))
            return
        half = len(rows) // 2
        search(rows[:half], found)
        search(rows[half:], found)

    found: list[int] = []
    search(rows, found)
    return found


def describe_examples(examples: Sequence[int], size: int) -> str:
    """Return the examples as part of a sentence; '' for none or all.

    >>> describe_examples([5], 16)
    'for example 5 of the batch'
    """
    if not examples or len(examples) == min(size, _MOST) > 1:
        return ""
    listed = ", ".join(map(str, examples))
    more = " and maybe more" if len(examples) >= _MOST else ""
    return f"for example{'s' * (len(examples) > 1)} {listed}{more} of the batch"


def name_failing_samples(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return the samples of the dataset that are the examples with which a step failed.

    Explainer for `CheckError`.
    """
    run = context.get("run")
    examples = getattr(error, "examples", ())
    batch = getattr(error, "batch", None)
    if run is None or not examples or batch is None:
        return None
    if (evaluation := context.get("evaluation")) is not None:
        return describe_samples(evaluation.dataloader, None, examples, batch, evaluation.path)
    if run.train_loop.batches_per_iteration > 1:
        return None
    return describe_samples(run.train_dataloader, run.iter, examples, batch)


def describe_samples(
    loader: Any,
    index: int | None,
    examples: Sequence[int],
    batch: Batch,
    path: str = "train_dataloader",
) -> str | None:
    """Return which samples of the dataset are these examples in the batch `index` of a run.

    None if that is not known: no examples, data without indices, or batches that have another
    order now.

    Args:
      loader: the dataloader.
      index: None for the first batch that is alike.
      examples: indices in the global batch; those of other processes are left out.
      batch: the batch, on the devices or on the host.
      path: the dataloader in the config.
    """
    if not examples or not isinstance(loader, DataLoader):
        return None
    epoch, position = divmod(index or 0, loader.length)
    given = jax.tree.leaves(process_local_batch(select_arrays(batch), batch))
    for drawn in draw_again(loader, index or 0, None if index is None else 1):
        leaves = jax.tree.leaves(drawn)
        if len(leaves) == len(given) and all(map(_are_alike, leaves, given)):
            break
        position += 1
    else:
        return None
    indices = loader.sample_indices(epoch, position)
    start = _first_row(batch)
    known = [i for i in examples if 0 <= i - start < len(indices)]
    listed = ", ".join(f"example {i} is sample {indices[i - start]}" for i in known)
    number = f", batch {position}" if index is None else ""
    return f"in {type(loader.dataset).__name__} of {path}{number}: {listed}" if listed else None


def draw_again(loader: Any, index: int, count: int | None = 1) -> Iterator[Batch]:
    """Yield `count` batches, from the batch `index` of a run on, as arrays; None for all."""
    epoch, start = divmod(index, loader.length or 1)
    with contextlib.closing(loader.copy_at_epoch(epoch)) as again:
        again.set_epoch(epoch, start)
        yield from map(select_arrays, itertools.islice(again, count))


def list_some(items: Sequence[Any], most: int = 5) -> str:
    """Return the first items as text, and how many more there are.

    >>> list_some([3, 4, 5], most=2)
    '3, 4 and 1 more'
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(map(str, items[:most]))}{more}"


def fetch(tree: Any) -> Any:
    """Return arrays on the host, those of other processes too: all must call it."""

    def fetch_leaf(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            sharding: Any = leaf.sharding
            whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
            leaf = jax.device_put(leaf, whole)
        return jax.device_get(leaf)

    return jax.tree.map(fetch_leaf, tree)


def _first_row(batch: Batch) -> int:
    """Return the first row in the global batch that this process has."""
    arrays = [x for x in jax.tree.leaves(batch) if isinstance(x, jax.Array) and x.ndim]
    return min((s.index[0].start or 0 for x in arrays[:1] for s in x.addressable_shards), default=0)


def _are_alike(first: Any, second: Any) -> bool:
    second = np.asarray(second)
    return bool(np.array_equal(np.asarray(first).astype(second.dtype), second, equal_nan=True))


def _take(batch: Batch, rows: np.ndarray, size: int) -> Batch:
    """Return a batch with only these examples, repeated: the program is compiled for its size."""
    index = np.resize(rows, size)

    def take(leaf: Any) -> Any:
        if not np.ndim(leaf) or np.shape(leaf)[0] != size:
            return leaf
        taken = fetch(leaf)[index]
        return put_whole(taken, leaf.sharding) if isinstance(leaf, jax.Array) else taken

    return jax.tree.map(take, batch)
