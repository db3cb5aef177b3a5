"""Prompts for generation, in rows of one length."""

from typing import Any

import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.config.registry import DATASETS
from jengine.extras.language.chat import ChatTemplate
from jengine.extras.language.records import Source, make_format, read_records
from jengine.extras.language.tokenizers import TokenizerLike, build_tokenizer

_MAX_TOKENS = 2**30  # of 4 bytes


@DATASETS.register_module()
class Prompts:
    """Dataset of prompts for a `TextGenerator`, with the responses to compare with if the records
    have them.

    >>> prompts = Prompts(
    ...     [dict(prompt="2 + 2 =", response="4"), dict(prompt="6 * 7 =", response="42")]
    ... )
    >>> sample = prompts[1]
    >>> sample["prompt"].tolist(), int(sample["prompt_length"]), str(sample["response"])
    ([54, 32, 42, 32, 55, 32, 61], 7, '42')

    Args:
      source: a `.jsonl` file with one record in each line, a `.txt` file with one prompt in each
        line, a dataset with records or its config, or records: see `TextFormat`.
      tokenizer: 'bytes', the path of a tokenizer file or of a directory of the Hub, or a tokenizer.
      length: number of tokens in a row, which shorter prompts are padded to; None for those of the
        longest prompt.
      template, response, chat_template: see `TextFormat`; None for the chat template of the
        tokenizer.

    Attributes:
      arrays: `prompt`, int32[N, length], and `prompt_length`, int32[N].
      texts: the prompts.
      responses: the responses; empty if there are none.

    Raises:
      ConfigError: no prompts, one without tokens or with more than `length`, or only some with a
        response.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerLike = "bytes",
        length: Count | None = None,
        template: str = "{prompt}",
        response: str = "response",
        chat_template: ChatTemplate | str | None = None,
    ) -> None:
        self.tokenizer = build_tokenizer(tokenizer)
        style = make_format(self.tokenizer, template, response, chat_template)
        found_records = read_records(source, lines=True)
        records = [found_records[i] for i in range(len(found_records))]
        self.texts = [style.make_prompt(record) for record in records]
        found = [style.find_response(record) for record in records]
        self.responses = [text for text in found if text is not None]
        tokens = [self.tokenizer.encode(text) for text in self.texts]
        sizes = [row.size for row in tokens]
        if not sizes or not min(sizes):
            raise ConfigError(
                f"Prompts: `source` must have prompts with at least one token, got {records[:3]}"
            )
        if length is not None and max(sizes) > length:
            longest = self.texts[int(np.argmax(sizes))]
            raise ConfigError(
                f"Prompts: `length` must be at least {max(sizes)}, the tokens of {longest!r}, got "
                f"{length}"
            )
        if self.responses and len(self.responses) < len(records):
            raise ConfigError(
                f"Prompts: all records or none must have a response, got {len(self.responses)}"
            )
        if len(sizes) * max(sizes) > _MAX_TOKENS:
            raise ConfigError(
                f"Prompts: `source` must have at most {_MAX_TOKENS:,} tokens when padded to the "
                f"longest prompt, got {len(sizes):,} prompts, the longest with {max(sizes):,}"
            )
        # One length for all, so that generation compiles once; `prompt_length` tells where the
        # padding begins.
        rows = np.zeros((len(sizes), length or max(sizes)), np.int32)
        for row, values in zip(rows, tokens, strict=True):
            row[: values.size] = values
        self.arrays = {"prompt": rows, "prompt_length": np.array(sizes, np.int32)}

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = {name: array[index] for name, array in self.arrays.items()}
        return {**sample, "response": self.responses[index]} if self.responses else sample
