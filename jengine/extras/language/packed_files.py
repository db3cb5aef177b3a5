"""Packed rows from files of text, prompts with responses or conversations, in a config."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from jengine.config.annotations import Count, Positive
from jengine.config.errors import ConfigError, closest, config_path
from jengine.config.registry import DATASETS
from jengine.extras.language.chat import ChatTemplate
from jengine.extras.language.packing import pack
from jengine.extras.language.records import (
    Records,
    Source,
    TextFormat,
    make_format,
    read_records,
    split_record,
)
from jengine.extras.language.tokenizers import TokenizerLike, build_tokenizer

if TYPE_CHECKING:
    import grain


@DATASETS.register_module("PackedText")
def packed_text(
    sources: Source,
    tokenizer: TokenizerLike,
    length: Count,
    weights: Mapping[str, Positive] | None = None,
    packing: Literal["concat", "first_fit"] = "first_fit",
    template: str = "{prompt}",
    response: str = "response",
    chat_template: ChatTemplate | str | None = None,
    shuffle: bool = True,
    repeat: bool = True,
    seed: int = 0,
    open_rows: Count = 16,
) -> "grain.IterDataset":
    """Return the rows of `pack` for files, or for several sources that are mixed by weights.

    >>> answers, prose = [dict(prompt="2 + 3 =", response=" 5")], ["a text", "another"]
    >>> rows = packed_text(
    ...     dict(answers=answers, prose=prose), "bytes", 32, weights=dict(answers=3, prose=1)
    ... )
    >>> next(iter(rows))["targets"][:10].tolist()  # ' 5' and the end are learned
    [-1, -1, -1, -1, -1, -1, 32, 53, 256, -1]

    Args:
      sources: a `.jsonl` or `.txt` file, records, a dataset with records or its config; or a dict
        of these by name.
      tokenizer: 'bytes', the path of a tokenizer file or of a directory of the Hub, or a tokenizer.
      length, packing, shuffle, seed, open_rows: see `pack`.
      weights: the share of the records from each source, by name, up to a common factor; None to
        read each record once in a pass.
      template, response, chat_template: see `TextFormat`; None for the chat template of the
        tokenizer.
      repeat: False for one pass, for an evaluation.

    Raises:
      ConfigError: weights for other names than those of the sources, or without `repeat`; a source
        without text.
      ValueError: the first record of a source is none.
    """
    import grain

    built = build_tokenizer(tokenizer)
    style = make_format(built, template, response, chat_template)
    by_name: Mapping[str, Any] = (
        sources if isinstance(sources, Mapping) and "type" not in sources else {"": sources}
    )
    datasets: dict[str, grain.MapDataset] = {}
    for name, source in by_name.items():
        with config_path("sources", *([name] if name else [])):
            records = read_records(source)
            if not isinstance(records, grain.MapDataset):
                _check_records(records, style)
        datasets[name] = (
            records if isinstance(records, grain.MapDataset) else grain.MapDataset.source(records)
        )
    if weights is None:
        mixed = grain.MapDataset.concatenate(list(datasets.values()))
    else:
        _check_weights(weights, datasets, repeat)
        each = {name: data.seed(seed + i) for i, (name, data) in enumerate(datasets.items())}
        endless = [(data.shuffle() if shuffle else data).repeat() for data in each.values()]
        mixed = grain.MapDataset.mix(endless, weights=[weights[name] for name in each])
        shuffle = False  # each source is, in each of its passes
    return pack(
        mixed,
        length,
        packing=packing,
        tokenizer=built,
        shuffle=shuffle,
        seed=seed,
        open_rows=open_rows,
        style=style,
        repeat=repeat,
    )


PackedText = packed_text


def _check_records(records: Records, style: TextFormat) -> None:
    """Raise an error before anything is compiled: the first record is like the others in most
    files.
    """
    if not any(text for i in range(len(records)) for text, _ in split_record(records[i], style)):
        raise ConfigError(
            f"a source must have at least one record with text, got {len(records)} without"
        )


def _check_weights(weights: Mapping[str, float], names: Mapping[str, Any], repeat: bool) -> None:
    if set(weights) != set(names):
        wrong = next((name for name in weights if name not in names), None)
        hint = "" if wrong is None else closest(wrong, tuple(names))
        raise ConfigError(
            f"PackedText: `weights` must have {', '.join(names)}, got {', '.join(weights)}{hint}"
        )
    if not repeat:
        raise ConfigError(
            "PackedText: `weights` must be None with repeat=False: one pass has all records of "
            "each source"
        )
