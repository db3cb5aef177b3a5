"""Datasets for language models: windows over a long token sequence, and a small generated text."""

import os
from typing import Any, Literal

import numpy as np

from jengine.config.annotations import Count
from jengine.config.registry import DATASETS
from jengine.config.storage import local_copy

_ARTICLES = ("a", "the", "one", "every")
_ADJECTIVES = ("old", "small", "quiet", "green", "heavy", "bright", "slow", "empty")
_NOUNS = ("river", "garden", "teacher", "window", "horse", "letter", "island", "machine")
_VERBS = ("follows", "remembers", "hides", "paints", "carries", "answers", "crosses", "repairs")
_ENDINGS = ("at night", "in spring", "once more", "without a sound")
_SENTENCE = (_ARTICLES, _ADJECTIVES, _NOUNS, _VERBS, _ARTICLES, _ADJECTIVES, _NOUNS, _ENDINGS)


class Tokens(np.ndarray):
    """Tokens int32[N] with the bytes of each token of their vocabulary, as `encode_all` makes them.

    Attributes:
      token_bytes: int32[V], which slices have too; None for an array that was made otherwise.
    """

    token_bytes: np.ndarray | None

    def __array_finalize__(self, source: Any) -> None:
        self.token_bytes = getattr(source, "token_bytes", None)


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
        `tokenizer.token_bytes()` returns, or a `.npy` file; None for those of tokens from
        `encode_all`. With it, samples have `num_bytes`, int32[length], the bytes of each target,
        which `BitsPerByte` needs.

    Raises:
      ValueError: tokens that are not one axis of integers, or fewer than a window needs.
    """

    def __init__(self, tokens: Any, length: Count, token_bytes: Any = None) -> None:
        # Mapped: corpora are larger than memory, and processes on a machine share the pages.
        self.tokens = _read_array(tokens)
        token_bytes = getattr(tokens, "token_bytes", None) if token_bytes is None else token_bytes
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
        super().__init__(np.frombuffer(self.text.encode(), np.uint8), length, np.ones(256, int))
