"""Validation and test sections in a config: one evaluation, or several by name.

`dict(clean=dict(dataset=...), robust=dict(dataset=...))` and lists of dataloaders give each
evaluation a name, which the results have as prefix: `robust/accuracy/top1`. A single evaluation has
the name ''.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.config.annotations import Count, is_mapping, parameters_of
from jengine.config.errors import ConfigError, config_path, did_you_mean
from jengine.config.registry import EVALUATOR
from jengine.data.find_source import is_stream
from jengine.data.iterables import IterableLoader
from jengine.data.loader import DataLoader
from jengine.evaluation.evaluator import Evaluator, build_evaluator

_LOADER_ARGUMENTS = frozenset(
    {"type", "global_batch_size", "example_length", *parameters_of(DataLoader)}
)
_NAME = re.compile(r"[\w-]+")  # it becomes a part of file names and tags
# settings for all, in the same dicts
_RESERVED = ("evaluations", "fp16", "epoch_length", "interval", "metrics")


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """Settings for one evaluation.

    Attributes:
      fp16: predict in float16.
      epoch_length: number of batches to evaluate on, for a stream that does not end; None for all.
      interval: epochs or iterations, as the training loop counts, between two validations with this
        evaluation, which the last one has in any case; None for those of the training loop.
    """

    fp16: bool = False
    epoch_length: Count | None = None
    interval: Count | None = None


def split_dataloaders(argument: str, section: Any) -> dict[str, Any]:
    """Return the dataloaders in a section by evaluation name.

    A dict with an argument of a dataloader is one dataloader, and so is a list of batches.

    >>> list(
    ...     split_dataloaders(
    ...         "val_dataloader", dict(clean=dict(dataset=[1]), robust=dict(dataset=[2]))
    ...     )
    ... )
    ['clean', 'robust']
    >>> list(split_dataloaders("val_dataloader", dict(dataset=[1], batch_size=1)))
    ['']

    Raises:
      ConfigError: a name that cannot be a part of file names and tags.
    """
    if isinstance(section, list | tuple):
        if section and all(_is_loader(entry) and not _is_batch(entry) for entry in section):
            return {str(index): loader for index, loader in enumerate(section)}
        return {"": section}
    if not is_mapping(section) or not section or not _LOADER_ARGUMENTS.isdisjoint(section):
        return {"": section}
    has_loaders = any(map(_is_loader, section.values()))
    if not has_loaders and not all(map(_has_batches, section.values())):
        return {"": section}
    names = list(map(str, section))
    for name in names:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise ConfigError(
                f"`{argument}` must have names of letters, digits, '_' and '-', and none of "
                f"{', '.join(_RESERVED)}, got {name!r}"
            )
    return {name: section[name] for name in names}


def _is_batch(value: object) -> bool:
    """Return whether a dict in a list is a batch, which may have an entry `dataset` as well."""
    return (
        is_mapping(value)
        and not {"batch_size", "global_batch_size"} & set(value)
        and not set(value) <= _LOADER_ARGUMENTS
    )


def _is_loader(value: object) -> bool:
    return isinstance(value, DataLoader | IterableLoader) or (
        is_mapping(value) and "dataset" in value
    )


def _has_batches(value: object) -> bool:
    """Return whether a value of a dict is data in batches, which no argument of a dataloader
    would be.
    """
    if isinstance(value, list | tuple):
        return bool(value) and all(is_mapping(batch) for batch in value)
    return isinstance(value, DataLoader | IterableLoader) or is_stream(value)


def loader_path(mode: str, name: str) -> str:
    """Return a dataloader's path in the config.

    >>> loader_path("val", "robust"), loader_path("test", "0"), loader_path("val", "")
    ('val_dataloader.robust', 'test_dataloader[0]', 'val_dataloader')
    """
    suffix = f"[{name}]" if name.isdigit() else f".{name}" if name else ""
    return f"{mode}_dataloader{suffix}"


def list_dataloaders(
    cfg: Mapping[str, Any], modes: Sequence[str] = ("train", "val", "test")
) -> dict[str, Any]:
    """Return the dataloaders in a config by mode, for several evaluations with the name:
    'val.robust'.

    >>> list(
    ...     list_dataloaders(
    ...         dict(train_dataloader=[1], val_dataloader=dict(a=dict(dataset=[1]))),
    ...         ["train", "val"],
    ...     )
    ... )
    ['train', 'val.a']
    """
    found: dict[str, Any] = {}
    for mode in modes:
        section = cfg.get(f"{mode}_dataloader")
        split = (
            {"": section} if mode == "train" else split_dataloaders(f"{mode}_dataloader", section)
        )
        found |= {
            f"{mode}.{name}" if name else mode: loader
            for name, loader in split.items()
            if loader is not None
        }
    return found


def build_evaluators(argument: str, section: Any, names: Sequence[str]) -> dict[str, Evaluator]:
    """Build the evaluator for each evaluation: from a dict by name, from a list in order, or one
    for all.

    Equal sections give one object, so that evaluations with equal batches share a compiled program.

    Raises:
      ConfigError: an evaluation has no evaluator, or an evaluator no evaluation.
    """
    split = _split_evaluators(argument, section, names)
    built: list[tuple[Any, Evaluator]] = []
    evaluators = {}
    for name in names:
        found = [evaluator for other, evaluator in built if _is_equal(other, split[name])]
        if not found:
            keys = (name,) if split[name] is not section else ()
            with config_path(argument, *keys):
                found = [build_evaluator(split[name])]
            built.append((split[name], found[0]))
        evaluators[name] = found[0]
    return evaluators


def _split_evaluators(argument: str, section: Any, names: Sequence[str]) -> dict[str, Any]:
    by_name: Mapping[str, Any] = dict.fromkeys(names, section)
    if list(names) == [""]:
        return dict(by_name)
    if is_mapping(section) and not ("type" in section or "metrics" in section):
        by_name = section
    elif isinstance(section, list | tuple) and section and all(map(_is_evaluator, section)):
        by_name = {str(index): entry for index, entry in enumerate(section)}
    unknown = [str(name) for name in by_name if name not in names]
    missing = [name for name in names if name not in by_name]
    if unknown or missing:
        hint = did_you_mean(unknown[0], names) if unknown else ""
        raise ConfigError(
            f"`{argument}` must be one evaluator, or one for each of {', '.join(names)}, "
            f"got {', '.join(map(str, by_name))}{hint}"
        )
    return dict(by_name)


def _is_evaluator(value: object) -> bool:
    """Return whether an element of a list is a whole evaluator, and not one of several metrics."""
    if is_mapping(value):
        return "metrics" in value or str(value.get("type")) in EVALUATOR
    return isinstance(value, Evaluator | list | tuple) or (
        isinstance(value, str) and value in EVALUATOR
    )


def _is_equal(first: object, second: object) -> bool:
    try:
        # Configs compare by value, objects by identity: only the same object is shared.
        return first is second or bool(first == second)
    except ValueError:  # arrays
        return False


def split_settings(
    argument: str, cfg: Any, names: Sequence[str]
) -> tuple[Any, dict[str, Mapping[str, Any]]]:
    """Return a loop's config without the settings of single evaluations, and those by name.

    >>> split_settings("val_cfg", dict(fp16=True, robust=dict(interval=5)), ["clean", "robust"])
    ({'fp16': True}, {'robust': {'interval': 5}})
    """
    if list(names) == [""] or not is_mapping(cfg):
        return cfg, {}
    settings = {str(name): value for name, value in cfg.items() if name in names}
    rest = {name: value for name, value in cfg.items() if name not in names}
    return rest, settings
