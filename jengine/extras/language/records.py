"""Text records: documents, prompts with responses, and conversations.

Which parts a model learns.
"""

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from jengine.config.errors import ConfigError
from jengine.config.json_codec import decode
from jengine.config.registry import DATASETS
from jengine.config.storage import LARGE, file_name, local_copy, read_text
from jengine.extras.language.chat import ChatTemplate
from jengine.extras.language.tokenizers import Tokenizer

Record: TypeAlias = str | Mapping[str, Any]
Part: TypeAlias = tuple[str, bool]  # text, and whether it is learned


@runtime_checkable
class Records(Protocol):
    """A dataset with a record at each index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Source: TypeAlias = str | Mapping[str, Any] | Sequence[Any] | Records


@dataclasses.dataclass(frozen=True)
class TextFormat:
    r"""Text format for records, in parts that are learned (documents and responses) or only read
    (prompts).

    A record is a document (a string, or a dict with `text`); a prompt, with a response in training;
    or a conversation, `messages` with `role` and `content`, where the assistant's messages are
    learned.

    >>> style = TextFormat("Q: {prompt}\nA: ")
    >>> style.split(dict(prompt="2 + 2?", response="4"))
    [('Q: 2 + 2?\nA: ', False), ('4', True)]
    >>> style.split("a document")
    [('a document', True)]

    Attributes:
      template: prompt text, with record entries in braces.
      response: the entry with the response.
      chat_template: the template for messages; None if there are none.
    """

    template: str = "{prompt}"
    response: str = "response"
    chat_template: ChatTemplate | None = None

    def split(self, record: Record) -> list[Part]:
        """Return a record's parts, in order.

        Raises:
          ValueError: an entry is missing, or what `ChatTemplate.split` raises.
        """
        if isinstance(record, str):
            return [(record, True)]
        if "messages" in record:
            return self._get_chat_template().split(record["messages"], **_find_variables(record))
        if "text" in record:
            return [(record["text"], True)]
        try:
            prompt = self.template.format_map(record)
        except KeyError as error:
            raise ValueError(
                f"a record must have `text`, `messages`, or what the template {self.template!r} "
                f"names, got {', '.join(record)} without {error}"
            ) from None
        # A prompt alone is a record to answer: it has nothing to learn.
        return [
            (prompt, False),
            *([(record[self.response], True)] if self.response in record else []),
        ]

    def find_response(self, record: Record) -> str | None:
        """Return the text in a record's last response; None if it has none."""
        if isinstance(record, str):
            return None
        if record.get("messages"):
            last = record["messages"][-1]
            return last.get("content") if last.get("role") == "assistant" else None
        return record.get(self.response)

    def make_prompt(self, record: Record) -> str:
        """Return the text before the last response; a string is the entry `prompt`."""
        if not isinstance(record, str) and "messages" in record:
            messages = record["messages"]
            messages = (
                messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages
            )
            return self._get_chat_template().render(messages, True, **_find_variables(record))
        parts = self.split({"prompt": record} if isinstance(record, str) else record)
        if self.find_response(record) is not None:
            parts = parts[:-1]
        return "".join(text for text, _ in parts)

    def _get_chat_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ValueError("`chat_template` must be given for records with `messages`, got None")
        return self.chat_template


def _find_variables(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a conversation, besides its messages, that chat templates know."""
    return {name: record[name] for name in ("tools", "documents") if name in record}


def make_format(
    tokenizer: Tokenizer, template: str, response: str, chat_template: ChatTemplate | str | None
) -> TextFormat:
    """Return the record format.

    A chat template may be a text, or None for the tokenizer's template.
    """
    if isinstance(chat_template, str):
        chat_template = ChatTemplate.from_tokens(chat_template, tokenizer.special_tokens)
    return TextFormat(template, response, chat_template or tokenizer.chat_template)


def split_record(record: Record, style: TextFormat) -> list[Part]:
    """Return a record's parts, at least one to be learned.

    Raises:
      ValueError: a record with nothing to learn or other entries than texts, or what
        `TextFormat.split` raises.
    """
    try:
        parts = style.split(record)
        if wrong := [text for text, _ in parts if not isinstance(text, str)]:
            raise ValueError(f"the texts of a record must be strings, got {wrong[0]!r}")
        if not any(is_learned for _, is_learned in parts):
            raise ValueError(
                f"a record must have a response, `{style.response}` or an assistant's, to be "
                "learned"
            )
    except ValueError as error:
        error.add_note(f"in the record {reprlib.repr(record)}")
        raise
    return parts


def encode_record(
    record: Record, tokenizer: Tokenizer, style: TextFormat
) -> tuple[np.ndarray, np.ndarray]:
    """Return a record's tokens with its end, int32[N], and which tokens are learned, bool[N].

    >>> from jengine.extras.language.tokenizers import ByteTokenizer
    >>> tokens, is_learned = encode_record(
    ...     dict(prompt="a", response="bc"), ByteTokenizer(), TextFormat()
    ... )
    >>> tokens.tolist(), is_learned.tolist()
    ([97, 98, 99, 256], [False, True, True, True])
    """
    parts = split_record(record, style)
    text = "".join(part for part, _ in parts)
    # At once: some tokenizers add a space before each text, and merge characters across the borders
    # of the parts.
    tokens, spans = tokenizer.encode_with_spans(text)
    is_learned = _find_learned(parts, spans)
    ends = np.flatnonzero(np.isin(tokens, tokenizer.end_tokens))
    # the text has its end, maybe with a line break after it
    if ends.size and not text[spans[ends[-1], 1] :].strip():
        return tokens, is_learned
    return np.append(tokens, np.int32(tokenizer.end_token)), np.append(is_learned, parts[-1][1])


def _find_learned(parts: Sequence[Part], spans: np.ndarray) -> np.ndarray:
    """Return which tokens, with spans int[N, 2] of characters, have a part that is learned,
    bool[N].
    """
    sizes = [len(text) for text, _ in parts]
    counts = np.append(0, np.cumsum(np.repeat([is_learned for _, is_learned in parts], sizes)))
    starts = spans[:, 0]
    ends = spans[:, 1]
    # Tokenizers leave spaces out of spans. A token of nothing else belongs to the characters since
    # the token before.
    previous = np.append(0, np.maximum.accumulate(ends))[:-1]
    starts = np.where(starts < ends, starts, np.minimum(previous, ends))
    starts = np.where(starts < ends, starts, np.maximum(ends - 1, 0))
    return counts[ends] > counts[starts]


def read_records(source: Source, *, lines: bool = False) -> Records:
    """Return the records in a file or dataset, or the given ones.

    Args:
      source: a `.jsonl` file with one in each line; a `.txt` file, which is one document; a dataset
        with records or its config; or records.
      lines: whether each line in a `.txt` file is one.

    Raises:
      ConfigError: another ending or encoding, or a line that is no record in JSON.
    """
    if isinstance(source, Mapping):
        return DATASETS.build(source)
    if not isinstance(source, str):
        return source
    if not file_name(source).endswith((".jsonl", ".txt")):
        raise ConfigError(f"a file of text must end with .jsonl or .txt, got {source!r}")
    try:
        text = read_text(local_copy(source), limit=LARGE)
    except UnicodeDecodeError as error:
        raise ConfigError(f"a file of text must be UTF-8, got {source}: {error}") from None
    if file_name(source).endswith(".txt"):
        return [line for line in text.splitlines() if line] if lines else [text]
    records: list[Record] = []
    # a string in JSON may contain other line separators
    for number, line in enumerate(text.split("\n"), 1):
        try:
            record = decode(line) if line.strip() else ""
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"each line of {source} must be JSON, got in line {number}: {error}"
            ) from None
        if not isinstance(record, str | Mapping):
            raise ConfigError(
                f"each line of {source} must be an object or a string, got in line {number}: "
                f"{reprlib.repr(record)}"
            )
        if isinstance(record, Mapping) and (problem := _find_problem(record)):
            raise ConfigError(
                f"{problem}, got in line {number} of {source}: {reprlib.repr(record)}"
            )
        records += [record] if record else []
    return records


def _find_problem(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the form of a record from a file; None if nothing is."""
    messages = record.get("messages")
    if "messages" in record and not (
        isinstance(messages, list) and messages and all(map(_is_message, messages))
    ):
        return "`messages` of a record must be a list of objects with a `role`"
    if "messages" not in record and not isinstance(record.get("text", ""), str):
        return "`text` of a record must be a string"
    return None


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)
