"""Tokenizers: bytes, and byte-pair encodings from the `tokenizers` library."""

import functools
import os
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import require_extra
from jengine.config.json_codec import decode, decode_object
from jengine.config.storage import local_copy, read_bytes, read_text
from jengine.extras.language.chat import ChatTemplate

END = "<|endoftext|>"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # in vocabularies of characters, for other characters
_FILE = "tokenizer.json"  # in a directory of the Hub
_SETTINGS = "tokenizer_config.json"
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@runtime_checkable
class Tokenizer(Protocol):
    """Tokenizer methods that packing and generation need."""

    vocab_size: int
    end_token: int  # ends a document
    end_tokens: tuple[int, ...]  # each ends an answer; `end_token` is the first
    chat_template: ChatTemplate | None  # of messages
    special_tokens: Mapping[str, str]  # texts by name for chat templates, such as `eos_token`

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens for a text, int32[N]."""

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, int32[N], and the characters of each, [first, last + 1], int32[N,
        2].
        """

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text for tokens."""

    def token_bytes(self) -> np.ndarray:
        """Return how many bytes each token stands for, int32[vocab_size]."""


class ByteTokenizer:
    """Byte tokenizer, with 256 as the end-of-document token.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.decode(tokenizer.encode("naïve"))
    'naïve'
    """

    vocab_size = 257
    end_token = 256
    end_tokens: tuple[int, ...] = (256,)
    chat_template: ChatTemplate | None = None
    special_tokens: Mapping[str, str] = types.MappingProxyType({})

    def encode(self, text: str) -> np.ndarray:
        """Return the text's bytes, int32[N]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the text's bytes, int32[N], and the character of each, int32[N, 2]."""
        places = np.repeat(
            np.arange(len(text), dtype=np.int32), [len(character.encode()) for character in text]
        )
        return self.encode(text), np.stack([places, places + 1], axis=1)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(int(token) for token in tokens if token < 256).decode(errors="replace")

    def token_bytes(self) -> np.ndarray:
        """Return 1 for each byte, and 0 for the end."""
        return np.array([1] * 256 + [0], np.int32)


class FileTokenizer:
    """A tokenizer from a `tokenizer.json` file, as on the Hugging Face Hub, or one that was trained
    here.

    Args:
      path: the file, or a Hub directory with `tokenizer.json`.
      end_token: text for the token that ends a document; None for the `eos_token` in the
        directory's `tokenizer_config.json`, or else `<|endoftext|>`. Or several, each of which ends
        an answer; the first ends documents.

    Truncation and padding that the file may store are left out: rows are cut and padded by `pack`.

    Attributes:
      chat_template: the chat template in the directory; None if it has none.
      special_tokens: texts of the special tokens in the directory by name, such as `unk_token`.
      end_tokens: the tokens for `end_token`, and `eos_token_id` in the directory's
        `generation_config.json` or `config.json`.

    Raises:
      FileNotFoundError: the directory has no `tokenizer.json`.
      ValueError: the file is none, or has no such token.
    """

    chat_template: ChatTemplate | None = None
    special_tokens: Mapping[str, str]
    end_tokens: tuple[int, ...]

    def __init__(
        self, path: str | os.PathLike[str], end_token: str | Sequence[str] | None = None
    ) -> None:
        with require_extra("text", "FileTokenizer requires tokenizers"):
            import tokenizers
        ends = [end_token] if isinstance(end_token, str) else list(end_token or [])
        file = local_copy(path)
        end_ids = []
        tokens = {}
        if file.is_dir():
            settings = _read_settings(file / _SETTINGS)
            tokens = _find_special_tokens(
                {**_read_settings(file / "special_tokens_map.json"), **settings}
            )
            if (template := _read_template(file, settings)) is not None:
                self.chat_template = ChatTemplate.from_tokens(template, tokens)
            end_ids = _read_end_tokens(file)
            file = file / _FILE
        if not file.is_file():
            raise FileNotFoundError(
                "FileTokenizer: `path` must be a tokenizer.json or a directory with one, got "
                f"{path}"
            )
        try:
            model = tokenizers.Tokenizer.from_buffer(read_bytes(file))
        except Exception as error:  # the library raises no narrower type
            raise ValueError(
                f"FileTokenizer: `path` must be a file of a tokenizer, got {path}: {error}"
            ) from None
        ends = ends or [tokens.get("eos_token", END)]
        self._set(model, ends, os.fspath(path), end_ids)
        self.special_tokens = {**self.special_tokens, **tokens}

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: Count) -> "FileTokenizer":
        """Train a byte-level byte-pair encoding, which encodes any text without unknown tokens.

        Args:
          texts: the training texts.
          vocab_size: vocabulary size, at least 257: the bytes, the end-of-document token, and
            merged pairs.

        Source: Sennrich et al. 2016.
        """
        with require_extra("text", "FileTokenizer requires tokenizers"):
            import tokenizers
            from tokenizers import decoders, models, pre_tokenizers, trainers
        # The 256 bytes and the end token: with fewer, some text could not be encoded at all.
        if vocab_size < 257:
            raise ValueError(
                f"FileTokenizer.train: `vocab_size` must be at least 257, got {vocab_size}"
            )
        if isinstance(texts, str):
            raise ValueError(
                f"FileTokenizer.train: `texts` must be several texts, got {texts!r:.50}"
            )
        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            # All bytes, also those that the training texts do not have.
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        self = cls.__new__(cls)
        self._set(model, [END], "the trained tokenizer")
        return self

    def _set(
        self, model: Any, ends: Sequence[str], source: str, end_ids: Sequence[int] = ()
    ) -> None:
        # Saved by whoever called the tokenizer last: they would cut documents off, and train on the
        # padding.
        model.no_truncation()
        model.no_padding()
        self.model = model
        self.vocab_size = max(model.get_vocab().values()) + 1  # numbers may be left out
        found = [model.token_to_id(end) for end in ends]
        if None in found:
            wrong = ends[found.index(None)]
            raise ValueError(
                f"FileTokenizer: `end_token` must be a token of {source}, got {wrong!r}"
            )
        self.end_tokens = tuple(dict.fromkeys([*map(int, found), *end_ids]))
        self.end_token = self.end_tokens[0]
        self.special_tokens = {"eos_token": ends[0]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `tokenizer.json` file."""
        self.model.save(os.fspath(path))

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens for a text, int32[N], without those that a model's template adds."""
        return self.encode_with_spans(text)[0]

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, int32[N], and the characters of each, int32[N, 2]."""
        encoding = self.model.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text, without special tokens."""
        return self.model.decode([int(token) for token in tokens])

    def token_bytes(self) -> np.ndarray:
        """Return how many bytes each token stands for; 0 for special tokens.

        In a word vocabulary without spaces (WordPiece), spaces do not count.
        """
        added = self.model.get_added_tokens_decoder()
        settings = decode(self.model.to_str())
        is_byte_level = "ByteLevel" in repr((settings["pre_tokenizer"], settings["decoder"]))
        sizes = np.zeros(self.vocab_size, np.int32)
        for token, index in self.model.get_vocab().items():
            if index in added:
                sizes[index] = 0 if added[index].special else len(token.encode())
            elif is_byte_level:
                sizes[index] = len(token)  # a character of the alphabet is a byte
            elif not _BYTE.fullmatch(token):
                sizes[index] = len(token.removeprefix("##").replace("\u2581", " ").encode())
            else:
                sizes[index] = 1
        return sizes


def _find_special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by name, such as `eos_token`.

    Older files store them along with settings.
    """
    found = {name: settings.get(name) for name in _SPECIAL}
    texts = {
        name: token.get("content") if isinstance(token, Mapping) else token
        for name, token in found.items()
    }
    if wrong := [name for name, text in texts.items() if not isinstance(text, str | None)]:
        raise ValueError(f"`{wrong[0]}` of a tokenizer must be a text, got {texts[wrong[0]]!r:.80}")
    return {name: text for name, text in texts.items() if text}


def _read_end_tokens(directory: Path) -> list[int]:
    """Return `eos_token_id`, which may be one or several, of the settings for generation, or
    else of the model.
    """
    for name in ("generation_config.json", "config.json"):
        if (ids := _read_settings(directory / name).get("eos_token_id")) is not None:
            found = ids if isinstance(ids, list) else [ids]
            if not all(type(number) is int and number >= 0 for number in found):
                raise ValueError(
                    f"`eos_token_id` of {directory / name} must be one or more numbers, got "
                    f"{ids!r:.80}"
                )
            return found
    return []


def _read_settings(file: Path) -> dict[str, Any]:
    """Return the settings in a JSON file; {} if there is no such file."""
    try:
        return decode_object(read_bytes(file)) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} must have settings in JSON: {error}") from error


def _read_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    text = settings.get("chat_template")
    if file.is_file():
        text = read_text(file)
    elif isinstance(text, list):  # several by name
        named = {
            each.get("name"): each.get("template") for each in text if isinstance(each, Mapping)
        }
        text = named.get("default")
    if not isinstance(text, str | None):
        raise ValueError(
            f"`chat_template` of {directory / _SETTINGS} must be a text, got {text!r:.80}"
        )
    return text


TokenizerLike = str | Tokenizer  # what a config may have


def build_tokenizer(tokenizer: TokenizerLike) -> Tokenizer:
    """Return a tokenizer from a config.

    >>> build_tokenizer("bytes").vocab_size
    257

    Args:
      tokenizer: 'bytes', the path to a `tokenizer.json` or Hub directory, or a tokenizer.
    """
    return _load(tokenizer) if isinstance(tokenizer, str) else tokenizer


@functools.cache
def _load(name: str) -> Tokenizer:
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)


def decode_text(tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray) -> str:
    """Return the text for generated tokens, up to the first token that ends an answer.

    >>> decode_text(ByteTokenizer(), [104, 105, 256, 256])
    'hi'
    """
    tokens = np.asarray(tokens)
    ends = np.flatnonzero(np.isin(tokens, tokenizer.end_tokens))
    return tokenizer.decode(tokens[: ends[0]] if ends.size else tokens)
