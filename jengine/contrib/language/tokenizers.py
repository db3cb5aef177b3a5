"""Tokenizers: bytes, and byte-pair encodings of the `tokenizers` library."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from jengine.annotations import Count
from jengine.errors import require_extra

END = "<|endoftext|>"


class Tokenizer(Protocol):
    """What packing and generation need of a tokenizer."""

    vocab_size: int
    end_token: int  # ends a document

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int32[N]."""

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens."""

    def token_bytes(self) -> np.ndarray:
        """Return the number of bytes that each token stands for, int32[vocab_size]."""


class ByteTokenizer:
    """The bytes of a text as tokens, and 256 for the end of a document.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.decode(tokenizer.encode("naïve"))
    'naïve'
    """

    vocab_size = 257
    end_token = 256

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of a text, int32[N]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(int(token) for token in tokens if token < 256).decode(errors="replace")

    def token_bytes(self) -> np.ndarray:
        """Return 1 for each byte, and 0 for the end."""
        return np.array([1] * 256 + [0], np.int32)


class FileTokenizer:
    """A tokenizer from a `tokenizer.json` file, as on the Hugging Face Hub, or one that was trained here.

    Args:
      path: the file; None to train one with `FileTokenizer.train`.
      end_token: text of the token that ends a document.

    Raises:
      ValueError: the file has no such token.
    """

    def __init__(self, path: str | os.PathLike[str], end_token: str = END) -> None:
        with require_extra("text", "FileTokenizer requires tokenizers"):
            import tokenizers
        self._set(tokenizers.Tokenizer.from_file(os.fspath(path)), end_token, os.fspath(path))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: Count) -> "FileTokenizer":
        """Train a byte-level byte-pair encoding, which encodes any text without unknown tokens.

        Args:
          texts: the training texts.
          vocab_size: number of tokens, at least 257: the bytes, the end of a document, and merged pairs.

        Source: Sennrich et al. 2016.
        """
        with require_extra("text", "FileTokenizer requires tokenizers"):
            import tokenizers
            from tokenizers import decoders, models, pre_tokenizers, trainers
        if vocab_size < 257:
            raise ValueError(f"FileTokenizer.train: `vocab_size` must be at least 257, got {vocab_size}")
        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        self = cls.__new__(cls)
        self._set(model, END, "the trained tokenizer")
        return self

    def _set(self, model: Any, end_token: str, source: str) -> None:
        self.model = model
        self.vocab_size = int(model.get_vocab_size())
        end = model.token_to_id(end_token)
        if end is None:
            raise ValueError(f"FileTokenizer: `end_token` must be a token of {source}, got {end_token!r}")
        self.end_token = int(end)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `tokenizer.json` file."""
        self.model.save(os.fspath(path))

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int32[N], without those that a model's template adds."""
        return np.array(self.model.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text, without special tokens."""
        return self.model.decode([int(token) for token in tokens])

    def token_bytes(self) -> np.ndarray:
        """Return the number of bytes that each token of a byte-level vocabulary stands for; 0 for special tokens."""
        special = {token.content for token in self.model.get_added_tokens_decoder().values()}
        sizes = np.zeros(self.vocab_size, np.int32)
        for token, index in self.model.get_vocab().items():
            sizes[index] = 0 if token in special else len(token)  # a character of the alphabet is a byte
        return sizes
