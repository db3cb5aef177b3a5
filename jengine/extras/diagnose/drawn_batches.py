"""Batches from a loader, with dtypes, shapes and ranges, and a guess which entries are labels or
images.
"""

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.config import paths
from jengine.config.errors import ConfigError, config_path
from jengine.data.batch_check import BatchCheck
from jengine.data.batch_stream import BatchStream
from jengine.data.collate import to_numpy
from jengine.data.host_entries import is_array, list_host_entries
from jengine.data.iterables import IterableLoader
from jengine.data.loader import DataLoader
from jengine.data.masking import get_mask

# values of a host entry in the table, and characters of each
_NUM_VALUES = 3
_WIDTH = 24
# Why devices cannot store arrays, by NumPy dtype kind.
HOST_REASONS = {
    "O": "JAX has no arrays of Python objects",
    "U": "JAX has no arrays of strings",
    "S": "JAX has no arrays of bytes",
    "M": "JAX has no arrays of dates",
    "m": "JAX has no arrays of durations",
}
_TEXT = {"U": "str", "S": "bytes"}


@dataclasses.dataclass
class DrawnBatches:
    """Batches that were drawn."""

    seconds: list[float] = dataclasses.field(default_factory=list)  # to draw each batch
    examples: list[int] = dataclasses.field(default_factory=list)  # in each batch, without padding
    # For each batch that is kept: arrays by dotted path, and bool[B] that marks real examples, or a
    # slice for all.
    entries: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    masks: list[np.ndarray | slice] = dataclasses.field(default_factory=list)
    # dtype kinds by path; they stay on the host
    host_entries: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of batches that were drawn."""
        return len(self.seconds)

    def iterate(self, path: str) -> Iterator[np.ndarray]:
        """Yield an entry's values for each real example."""
        for leaf, mask in zip(self.entries[path], self.masks, strict=True):
            yield from leaf[mask]

    def varies(self) -> bool:
        """Return whether an entry for the device has several shapes."""
        on_device = (
            leaves for path, leaves in self.entries.items() if path not in self.host_entries
        )
        return any(len({leaf.shape for leaf in leaves}) > 1 for leaves in on_device)

    def find_labels(self) -> str | None:
        """Return the path of an entry like labels: integers [B], at least 0, that repeat or are
        named so; else None.
        """

        def is_like_labels(leaf: np.ndarray) -> bool:
            return leaf.dtype.kind in "iu" and leaf.ndim == 1 and bool((leaf >= 0).all())

        def repeats(path: str) -> bool:
            values = list(map(int, self.iterate(path)))
            return len(set(values)) < len(values)

        candidates = [
            path for path, leaves in self.entries.items() if all(map(is_like_labels, leaves))
        ]
        # By name first. Without one, integers that repeat are classes, those that never do are
        # indices or IDs.
        named = (path for path in candidates if "label" in path.lower())
        return next(itertools.chain(named, filter(repeats, candidates)), None)

    def find_images(self) -> str | None:
        """Return the path of the first entry like images, uint8 or float [B, H, W, 1 | 3 | 4].

        None without one.
        """

        def is_like_image(leaf: np.ndarray) -> bool:
            is_number = leaf.dtype == np.uint8 or jax.dtypes.issubdtype(leaf.dtype, np.floating)
            return is_number and leaf.ndim == 4 and leaf.shape[-1] in (1, 3, 4) and leaf.size > 0

        found = (path for path in self.entries if all(map(is_like_image, self.entries[path])))
        return next(found, None)

    def list_captions(self, metainfo: Mapping[str, Any] | None) -> list[str]:
        """Return for each real example the label, named by `classes` in `metainfo`, or else a
        string; or nothing.
        """
        labels = self.find_labels()
        if labels is not None:
            names = dict(enumerate((metainfo or {}).get("classes") or ()))
            return [str(names.get(int(label), label)) for label in self.iterate(labels)]
        for path, leaves in self.entries.items():
            if leaves[0].dtype.kind == "U" and leaves[0].ndim == 1:
                return [os.path.basename(str(text)) for text in self.iterate(path)]
        return []


def draw_batches(
    loader: DataLoader | IterableLoader, count: int, name: str, max_bytes: int = 2**30
) -> DrawnBatches:
    """Draw the first `count` batches in a pass, with the checks in a run, and keep `max_bytes`
    besides the first one.

    Errors in the data get notes with the batch and the line of code; messages contain the name,
    'train_dataloader'.
    """
    drawn = DrawnBatches()
    num_bytes = 0
    with contextlib.closing(BatchStream(loader, BatchCheck(name, loader.batch_axis))) as stream:
        for index in range(count):
            start = time.perf_counter()
            with config_path(name), _noting_place(index):
                taken = stream.take(1)
                seconds = time.perf_counter() - start
                if not taken:
                    break
                batch = to_numpy(taken.pop())
            mask = get_mask(batch) if loader.batch_axis == 0 else None
            drawn.seconds.append(seconds)
            drawn.examples.append((loader.batch_size or 1) if mask is None else int(np.sum(mask)))
            leaves = paths.flatten(batch)
            num_bytes += sum(np.asarray(leaf).nbytes for leaf in leaves.values())
            if index and num_bytes > max_bytes:
                continue
            # A copy: a worker needs the memory of its batch again.
            for path, leaf in leaves.items():
                drawn.entries.setdefault(path, []).append(np.array(leaf))
            drawn.masks.append(slice(None) if mask is None else np.array(mask))
            if not index:
                drawn.host_entries = {
                    path: np.asarray(leaves[path]).dtype.kind for path in list_host_entries(batch)
                }
    if not drawn.count:
        raise ConfigError(
            f"`{name}` must yield at least one batch, got none; check the data, and filters of it"
        )
    return drawn


@contextlib.contextmanager
def _noting_place(index: int) -> Iterator[None]:
    """Add the batch to errors."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in batch {index}")
        raise


def describe_entry(leaves: Sequence[np.ndarray]) -> tuple[str, str, str, str]:
    """Return dtype, shape, values and place of an entry as text, from the arrays in all batches.

    >>> describe_entry([np.zeros((4, 8), np.float32), np.ones((4, 6), np.float32)])
    ('float32', '[4, 6-8]', '0 to 1, mean 0.4286', 'device')
    """
    dtypes = sorted({_TEXT.get(leaf.dtype.kind, str(leaf.dtype)) for leaf in leaves})
    place = "host"
    if is_array(leaves[0]):
        # What JAX makes of it: float64 becomes float32 unless x64 is enabled, which users often do
        # not know.
        on_device = jax.dtypes.canonicalize_dtype(leaves[0].dtype)
        place = "device" if on_device == leaves[0].dtype else f"device, as {on_device}"
    values = np.concatenate([leaf.ravel() for leaf in leaves])
    shapes = _merge_shapes([leaf.shape for leaf in leaves])
    return ", ".join(dtypes), shapes, _describe_values(values), place


def _merge_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return one shape, with the shortest and longest length of an axis that varies: `[64,
    12-40]`.
    """
    if len(set(map(len, shapes))) > 1:
        return " or ".join(sorted({str(list(shape)) for shape in shapes}))
    axes = [(min(lengths), max(lengths)) for lengths in zip(*shapes, strict=True)]
    return f"[{', '.join(str(low) if low == high else f'{low}-{high}' for low, high in axes)}]"


def _describe_values(values: np.ndarray) -> str:
    """Return the range for numbers, the share for booleans, or some other values."""
    kind = values.dtype.kind
    if not values.size:
        return "empty"
    if not is_array(values):
        shown = values[:_NUM_VALUES]
        texts = list(map(str, shown) if kind in "Mm" else map(repr, shown.tolist()))
        texts = [text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..." for text in texts]
        return ", ".join(texts + ["..."] * (len(values) > len(texts)))
    if kind == "b":
        return f"{values.mean():.4g} of them True"
    if kind in "iu":
        return f"{values.min()} to {values.max()}"
    if kind == "c":
        return f"magnitude {_describe_values(np.abs(values))}"
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "not finite"
    # In float64: a float16 sum overflows, a float32 one of many pixels loses digits.
    mean = float(finite.sum(dtype=np.float64)) / finite.size
    text = f"{float(finite.min()):.4g} to {float(finite.max()):.4g}, mean {mean:.4g}"
    rest = values.size - finite.size
    return f"{text}; {rest:,} not finite" if rest else text
