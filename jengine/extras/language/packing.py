"""Documents packed by grain into rows with one length."""

import functools
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.extras.language.records import TextFormat, encode_record
from jengine.extras.language.token_windows import Tokens
from jengine.extras.language.tokenizers import Tokenizer

if TYPE_CHECKING:
    import grain

_LOGGER = logging.getLogger("jengine")
IGNORED = -1  # the target of padding


def pack(
    documents: "grain.MapDataset | Sequence[Any]",
    length: Count,
    *,
    packing: Literal["concat", "first_fit"] = "concat",
    tokenizer: Tokenizer | None = None,
    shuffle: bool = True,
    seed: int = 0,
    open_rows: Count = 16,
    style: TextFormat | None = None,
    repeat: bool = True,
) -> "grain.IterDataset":
    """Return an endless dataset with rows that several documents share.

    >>> rows = pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]], length=4, shuffle=False)
    >>> {name: x.tolist() for name, x in next(iter(rows)).items() if name != "num_bytes"}
    {'tokens': [1, 2, 4, 6], 'targets': [2, 3, 5, 7], 'segment_ids': [1, 1, 2, 3], 'positions': [0,
    1, 0, 0]}

    A row has the entries `tokens`, `targets` (the next tokens in the same document), `segment_ids`
    (1, 2, ..., and 0 for padding), `positions` within the document, and `num_bytes` per target, all
    int32[length]; in a model with `inputs=["tokens", "segment_ids", "positions"]`, documents do not
    see each other. A run resumes at the row. Mix several sources with `grain.MapDataset.mix([...],
    weights=[...])`, repeated ones with `.repeat()`.

    Args:
      documents: int[N] arrays with two or more tokens, or texts or records (see `TextFormat`) for
        the tokenizer; empty texts are left out. Tokens that are not learned, such as a prompt, have
        the target -1.
      length: row length in tokens.
      packing: 'concat' fills every row, except the last one without `repeat`, and divides
        documents; 'first_fit' keeps those up to `length` whole, each in the first open row with
        enough room, and cuts longer ones off. Padding has the target -1 (`ignore_index=-1`).
      tokenizer: for texts, and for byte counts; it ends each document. None for tokens, one byte
        each.
      shuffle: whether each pass has another random order.
      seed: seed for the order.
      open_rows: how many rows are filled at a time, with 'first_fit'.
      style: the record format; None for prompts as they are.
      repeat: False for one pass over the documents, for an evaluation.

    Raises:
      ConfigError: no documents, or only empty ones.
    """
    import grain
    from grain import experimental

    data = (
        documents if isinstance(documents, grain.MapDataset) else grain.MapDataset.source(documents)
    )
    to_pairs = functools.partial(_to_pairs, tokenizer, style or TextFormat())
    if all(to_pairs(data[i]) is None for i in range(len(data))):  # grain would look for one forever
        raise ConfigError("pack: `documents` must have at least one that is not empty, got none")
    data = data.seed(seed)
    if shuffle:
        data = data.shuffle()
    sizes = None if tokenizer is None else tokenizer.token_bytes()
    if repeat and len(data) < sys.maxsize:  # grain repeats a dataset once
        data = data.repeat()
    # Grain looks at each element of its buffer for each document: the default of 500 takes longer
    # than the tokenizer.
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
    pairs = data.map(to_pairs).to_iter_dataset(read)
    lengths = {"tokens": length, "targets": length}
    if packing == "concat":
        rows = experimental.ConcatThenSplitIterDataset(pairs, length_struct=lengths)
    else:
        rows = experimental.FirstFitPackIterDataset(
            pairs.map(functools.partial(_cut, length)),
            length_struct=lengths,
            num_packing_bins=open_rows,
            shuffle_bins=shuffle,
            seed=seed,
        )

    return rows.map(functools.partial(_to_row, sizes))


def _to_pairs(
    tokenizer: Tokenizer | None, style: TextFormat, document: Any
) -> dict[str, np.ndarray] | None:
    """Return a document's tokens and their targets, int32[N - 1] each.

    None, which grain skips, for no text.
    """
    is_learned: np.ndarray | None = None
    if isinstance(document, str | Mapping):
        if tokenizer is None:
            raise ValueError("pack: `tokenizer` must be given for texts, got None")
        document, is_learned = encode_record(document, tokenizer, style)
        if len(document) == 1:  # the end
            return None
    tokens = np.asarray(document, np.int32)
    if tokens.ndim != 1 or tokens.size < 2:
        raise ValueError(
            "pack: documents must be int[N] with at least 2 tokens, got "
            f"{tokens.dtype}{tokens.shape}"
        )
    # A target is learned if it is itself part of an answer; the last prompt token predicts the
    # first of them.
    targets = tokens[1:] if is_learned is None else np.where(is_learned[1:], tokens[1:], IGNORED)
    return {"tokens": tokens[:-1], "targets": targets}


def _cut(length: int, pair: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    if (pair["targets"][:length] == IGNORED).all():
        _warn_once(
            "pack: a prompt fills a row of %d tokens, so nothing of its response is learned", length
        )
    elif len(pair["tokens"]) > length:
        _warn_once(
            "pack: documents of more than %d tokens are cut off there; packing='concat' divides "
            "them instead",
            length,
        )
    return {name: x[:length] for name, x in pair.items()}


@functools.cache
def _warn_once(message: str, length: int) -> None:
    _LOGGER.warning(message, length)


def _to_row(sizes: np.ndarray | None, row: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    # Grain pads rows with zeros, which are no segment but a token.
    targets = np.where(row["tokens_segment_ids"] > 0, row["targets"], IGNORED)
    is_known = targets != IGNORED
    # Bytes of the targets, for bits per byte: a measure that does not depend on the tokenizer.
    num_bytes = np.int32(1) if sizes is None else sizes[np.where(is_known, targets, 0)]
    return {
        "tokens": row["tokens"],
        "targets": targets,
        "segment_ids": row["tokens_segment_ids"],
        "positions": row["tokens_positions"],
        "num_bytes": np.where(is_known, num_bytes, 0),
    }


def encode_all(texts: Iterable[str], tokenizer: Tokenizer) -> Tokens:
    """Concatenate the tokens for all texts, each with an end-of-document token: int32[N], for
    `TokenWindows`, with the bytes of the vocabulary.

    >>> from jengine.extras.language.tokenizers import ByteTokenizer
    >>> encode_all(["a", "bc"], ByteTokenizer()).tolist()
    [97, 256, 98, 99, 256]
    """
    parts = [np.append(tokenizer.encode(text), tokenizer.end_token) for text in texts]
    if not parts or isinstance(texts, str):
        raise ValueError(f"encode_all: `texts` must be one or more texts, got {texts!r:.50}")
    tokens = np.concatenate(parts).astype(np.int32).view(Tokens)
    tokens.token_bytes = tokenizer.token_bytes()
    return tokens
