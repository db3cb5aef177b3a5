"""Datasets: arrays in memory and handwritten digits."""

import importlib.util
import operator
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from jengine.config.errors import require_extra
from jengine.config.registry import DATASETS
from jengine.data.collate import count_examples, is_flat
from jengine.data.host_entries import Batch


@DATASETS.register_module()
class ArrayDataset:
    """Dataset in memory; sample i has entry i from each array.

    >>> ArrayDataset({"x": np.array([1.0, 2.0]), "label": np.array([0, 1])})[1]
    {'label': np.int64(1), 'x': np.float64(2.0)}

    Args:
      arrays: NumPy arrays (or values that convert to them) with equal leading length, usually in a
        dict or a tuple; a list of arrays counts as a tuple.
      metainfo: facts about the dataset for metrics and visualizers, such as the class names.

    Raises:
      ValueError: the arrays differ in length.
    """

    def __init__(self, arrays: Batch, metainfo: Mapping[str, Any] | None = None) -> None:
        # a list would be read as samples to collate: in PyTorch, `__getitems__` returns such a list
        self.arrays = jax.tree.map(
            np.asarray, tuple(arrays) if isinstance(arrays, list) else arrays
        )
        self.metainfo = dict(metainfo or {})
        self._size = count_examples(self.arrays)
        self._is_flat = is_flat(self.arrays)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return jax.tree.map(operator.itemgetter(index), self.arrays)

    def __getitems__(self, indices: np.ndarray) -> Any:
        if not self._is_flat:
            return jax.tree.map(lambda array: array.take(indices, axis=0), self.arrays)
        batch = {}
        for name, array in self.arrays.items():  # as tree.map, at a third of its cost
            # copies whole rows, which `array[indices]` does not
            batch[name] = array.take(indices, axis=0)
        return batch


@DATASETS.register_module()
class Digits(ArrayDataset):
    """1,797 handwritten digits with 8x8 pixels (the test part of the UCI set), bundled with
    scikit-learn.

    A fifth (359 images) is held out as 'test', chosen by a fixed permutation and not stratified by
    class. Samples are `image`: float32[8, 8, 1] (float32[64] when `flat`), 0 to 1, and `label`:
    int32[].

    Args:
      split: 'train' (1,438 images) or 'test' (359).
      flat: whether an image is flattened to 64 numbers.

    Raises:
      ValueError: an unknown split. ImportError: scikit-learn is not installed.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository,
    1998.
    """

    extra = "examples"

    def __init__(self, split: Literal["train", "test"] = "train", flat: bool = False) -> None:
        table = _read_digits()
        images = table[:, :-1]
        labels = table[:, -1]
        # A fixed order, so that the two splits are disjoint in every process and version;
        # `RandomState` is frozen by NumPy.
        order = np.random.RandomState(0).permutation(len(labels))
        held_out = len(labels) // 5
        indices = order[:held_out] if split == "test" else order[held_out:]
        images = (images[indices] / 16).astype(np.float32)
        super().__init__(
            {
                "image": images if flat else images.reshape(-1, 8, 8, 1),
                "label": labels[indices].astype(np.int32),
            },
            metainfo={"classes": tuple(str(digit) for digit in range(10))},
        )


def _read_digits() -> np.ndarray:
    """Return the rows of scikit-learn's file, float64[1797, 65]: 64 pixels from 0 to 16, the label.

    To import scikit-learn takes a second, most of it for SciPy.
    """
    with require_extra("examples", "Digits requires scikit-learn"):
        spec = importlib.util.find_spec("sklearn")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    file = pathlib.Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(file, delimiter=",")
