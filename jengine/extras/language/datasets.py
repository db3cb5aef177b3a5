"""Text that every machine with Python has."""

import functools
import pathlib
import sysconfig
from typing import Literal

from jengine.config.annotations import Count
from jengine.config.registry import DATASETS
from jengine.extras.language.packing import encode_all
from jengine.extras.language.token_windows import TokenWindows
from jengine.extras.language.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer

_TEST_EVERY = 20  # one file in so many is for tests
# the last are tables, alike in all files
_SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings"}


@DATASETS.register_module()
class StandardLibrary(TokenWindows):
    """Windows over the sources and documentation in Python's standard library.

    Samples are those of `TokenWindows`, with `num_bytes`. The splits read different files.

    Args:
      length: window length in tokens.
      split: 'train' or 'test'.
      vocab_size: vocabulary size for a byte-pair encoding trained on the 'train' files; None for
        bytes.
    """

    def __init__(
        self,
        length: Count = 256,
        split: Literal["train", "test"] = "train",
        vocab_size: Count | None = None,
    ) -> None:
        self.tokenizer = train_tokenizer(vocab_size)
        tokens = encode_all(read_standard_library(split), self.tokenizer)
        super().__init__(tokens, length)
        self.vocab_size = self.tokenizer.vocab_size


@DATASETS.register_module()
class Additions:
    """Records that add two numbers, as tiny data for fine-tuning and its evaluation.

    >>> Additions(limit=10)[13]
    {'prompt': '1 + 4 =', 'response': ' 5'}

    Args:
      limit: the numbers are less than it.
      split: 'train', or 'test' for every tenth sum.
    """

    def __init__(self, limit: Count = 100, split: Literal["train", "test"] = "train") -> None:
        self.limit = limit
        self.indices = [i for i in range(limit**2) if (i % 10 == 9) == (split == "test")]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, str]:
        first, second = divmod(self.indices[index], self.limit)
        return {"prompt": f"{first} + {second} =", "response": f" {first + second}"}


@functools.cache
def read_standard_library(split: Literal["train", "test"]) -> tuple[str, ...]:
    """Return each file's text, in path order."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts)
    )
    is_test = [i % _TEST_EVERY == 0 for i in range(len(files))]
    chosen = [path for path, test in zip(files, is_test, strict=True) if test == (split == "test")]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in chosen)
    return tuple(text for text in texts if text)


@functools.cache
def train_tokenizer(vocab_size: int | None) -> Tokenizer:
    """Return a byte-pair encoding trained on the 'train' files, or bytes for None."""
    if vocab_size is None:
        return ByteTokenizer()
    return FileTokenizer.train(read_standard_library("train"), vocab_size)
