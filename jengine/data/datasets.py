"""Datasets: arrays in memory, handwritten digits, windows over a long token sequence, and a
small generated text.
"""

import operator
import os
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from jengine.config.annotations import Count
from jengine.config.downloads import local_copy
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
        with require_extra("examples", "Digits requires scikit-learn"):
            from sklearn.datasets import load_digits
        images, labels = load_digits(return_X_y=True)
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


@DATASETS.register_module()
class TokenWindows:
    """Windows over a token sequence, for a language model that predicts each next token.

    Samples are `tokens`: int32[length], and `targets`: int32[length], the same shifted by one.
    Windows do not overlap, and an incomplete last one is dropped.

    >>> TokenWindows(np.arange(7), length=3)[1]["targets"]
    array([4, 5, 6], dtype=int32)

    Args:
      tokens: int[N], or the path to such an array in a `.npy` file, from which only the windows are
        read. A file at a URL (`gs://`, `s3://`, any that fsspec knows) is first copied to a cache
        directory, see `local_copy`.
      length: number of tokens in a window.
      token_bytes: int[V], how many bytes each token of the vocabulary stands for, as
        `tokenizer.token_bytes()` returns, or a `.npy` file. With it, samples have `num_bytes`,
        int32[length], the bytes of each target, which `BitsPerByte` needs.

    Raises:
      ValueError: tokens that are not one axis of integers, or fewer than a window needs.
    """

    def __init__(self, tokens: Any, length: Count, token_bytes: Any = None) -> None:
        # Mapped: corpora are larger than memory, and processes on a machine share the pages.
        self.tokens = _read_array(tokens)
        self.token_bytes = None if token_bytes is None else _read_array(token_bytes)
        self.length = length
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            raise ValueError(
                "TokenWindows: `tokens` must be one axis of integers, got "
                f"{self.tokens.dtype}{self.tokens.shape}"
            )
        if not len(self):
            raise ValueError(
                "TokenWindows: `length` must be less than the number of tokens, "
                f"{self.tokens.size}, got {length}"
            )

    def __len__(self) -> int:
        return max(self.tokens.size - 1, 0) // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"the dataset has {len(self)} windows, got the index {index}")
        start = (index % len(self)) * self.length
        window = np.asarray(self.tokens[start : start + self.length + 1], np.int32)
        sample = {"tokens": window[:-1], "targets": window[1:]}
        if self.token_bytes is not None:
            sample["num_bytes"] = np.asarray(self.token_bytes[window[1:]], np.int32)
        return sample


def _read_array(array: Any) -> np.ndarray:
    if isinstance(array, str | os.PathLike):
        return np.load(local_copy(array), mmap_mode="r")
    return np.asarray(array)


_ARTICLES = ("a", "the", "one", "every")
_ADJECTIVES = ("old", "small", "quiet", "green", "heavy", "bright", "slow", "empty")
_NOUNS = ("river", "garden", "teacher", "window", "horse", "letter", "island", "machine")
_VERBS = ("follows", "remembers", "hides", "paints", "carries", "answers", "crosses", "repairs")
_ENDINGS = ("at night", "in spring", "once more", "without a sound")
_SENTENCE = (_ARTICLES, _ADJECTIVES, _NOUNS, _VERBS, _ARTICLES, _ADJECTIVES, _NOUNS, _ENDINGS)


@DATASETS.register_module()
class Sentences(TokenWindows):
    """Generated English sentences with eight random parts; the tokens are the text's bytes.

    A sentence has `ENTROPY` nats, so no model predicts it with a lower mean loss than `ENTROPY`
    divided by its bytes.

    Args:
      length: number of bytes in a window.
      split: 'train' or 'test', which have different random sentences.
      sentences: number of sentences, 51 bytes each on average.
    """

    ENTROPY = float(sum(np.log(len(part)) for part in _SENTENCE))

    def __init__(
        self, length: Count = 64, split: Literal["train", "test"] = "train", sentences: Count = 2000
    ) -> None:
        rng = np.random.RandomState(("train", "test").index(split))
        chosen = zip(*(rng.choice(part, sentences) for part in _SENTENCE), strict=True)
        self.text = "".join(f"{' '.join(words)}.\n" for words in chosen)
        super().__init__(np.frombuffer(self.text.encode(), np.uint8), length)
