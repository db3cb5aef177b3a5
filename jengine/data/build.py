"""Loaders from the dataloader sections in a config."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from jengine.config.annotations import Count, check_values, is_mapping
from jengine.config.errors import ConfigError, config_path, current_config_path
from jengine.config.registry import (
    DATA_SAMPLERS,
    DATASETS,
    FUNCTIONS,
    as_config,
    check_arguments,
    resolve_functions,
)
from jengine.data.find_source import is_map_style, is_stream, require_map_style
from jengine.data.iterables import IterableLoader
from jengine.data.loader import DataLoader
from jengine.data.samplers import DefaultSampler, IteratedSampler, Sampler
from jengine.data.step_values import StepValues, is_step_values, parse_step_values


def build_dataloader(
    cfg_or_loader: Any,
    *,
    train: bool,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> DataLoader | IterableLoader:
    """Build a loader from a config, or adapt an existing one.

    >>> loader = build_dataloader(
    ...     dict(dataset=[{"x": 1.0}, {"x": 2.0}, {"x": 3.0}], batch_size=2), train=False
    ... )
    >>> [batch["mask"].tolist() for batch in loader]
    [[True, True], [True, False]]

    Args:
      cfg_or_loader: a dict with `DataLoader`'s arguments, in which `dataset` and `sampler` may be
        dicts with a `type`, and `dataset` may also be a stream of examples (see `IterableLoader`);
        `global_batch_size` may replace `batch_size`, for the examples of all processes together,
        and both may be `StepValues`, as may `example_length`, which transforms read as
        `ctx.length`; or a loader; or an iterable of batches; or a function that returns an iterator
        over batches, or such a function's import path; or `dict(type=..., **arguments)` with a
        class or function that returns one of these. It is not modified.
      train: whether the data are for training. By default the order is then shuffled and
        `drop_last` is True; otherwise the data are in order and the last batch is padded.
      seed: sampler seed, unless the config has one.
      process_index, process_count: this process, and the number of processes that share the data.

    Raises:
      TypeError: an unknown or missing argument. ValueError: a number out of range, or data that
        cannot be iterated.
    """
    cfg_or_loader = name_to_function(cfg_or_loader)
    if is_mapping(cfg_or_loader) and "type" in cfg_or_loader:
        cfg_or_loader = _build_object(cfg_or_loader)
    shard = (process_index, process_count)
    if get_batch_axis(cfg_or_loader) is None:  # each process has the whole batch
        shard = (0, 1)
    if isinstance(cfg_or_loader, DataLoader | IterableLoader):
        divided = (
            cfg_or_loader if isinstance(cfg_or_loader, IterableLoader) else cfg_or_loader.sampler
        )
        _check_shard(divided, *shard)
        return cfg_or_loader
    if not is_mapping(cfg_or_loader):
        return IterableLoader(cfg_or_loader, train)
    arguments: dict[str, Any] = {"drop_last": train, "sampler": None, **dict(cfg_or_loader.items())}
    arguments, schedules = _take_schedules(resolve_functions(DataLoader, arguments), process_count)
    check_dataloader(arguments)  # before a dataset is built, which may take long
    # Shards that are cut to equal size have the same number of global batches, however many they
    # are
    round_up = "global_batch_size" not in arguments or not arguments["drop_last"]
    arguments = _divide_batch(arguments, process_count)
    with config_path("dataset"):
        arguments["dataset"] = _build_dataset(arguments["dataset"])
        if get_batch_axis(arguments) is None:
            shard = (0, 1)
            rules = getattr(arguments["dataset"], "batch_rules", None)
            arguments = {"batch_rules": rules, **arguments, "batch_axis": None}
        if is_stream(arguments["dataset"]):
            stream = _build_stream(arguments, train, *shard)
            if any(schedules):
                stream.follow(*schedules)
            return stream
    with config_path("sampler"):
        defaults = {"seed": seed, "process_index": shard[0], "process_count": shard[1]}
        sampler = arguments["sampler"]
        if sampler is None:
            sampler = DefaultSampler(
                arguments["dataset"], shuffle=train, round_up=round_up, **defaults
            )
        arguments["sampler"] = _build_sampler(sampler, arguments["dataset"], defaults)
        _check_shard(arguments["sampler"], *shard)
    loader = DataLoader(**arguments)
    if any(schedules):
        loader.follow(*schedules)
    return loader


def _take_schedules(
    cfg: Mapping[str, Any], shards: int
) -> tuple[dict[str, Any], tuple[StepValues | None, StepValues | None]]:
    """Return the section with the first of batch sizes that change, and the schedules of batch
    size and length.
    """
    taken = dict(cfg.items())
    sizes = None
    lengths = None
    for name in ("batch_size", "global_batch_size"):
        if name in taken and is_step_values(taken[name]):
            with config_path(name):
                sizes = parse_step_values(taken[name])
            taken[name] = sizes.values[0]
            if name == "global_batch_size":
                for size in sizes.values:
                    _divide_batch({"global_batch_size": size}, shards)
                sizes = StepValues([size // shards for size in sizes.values], sizes.milestones)
    if "example_length" in taken:
        with config_path("example_length"):
            lengths = parse_step_values(taken.pop("example_length"))
    return taken, (sizes, lengths)


def _build_object(cfg: Mapping[str, Any]) -> Any:
    """Build the loader or iterable in a dict with a `type`.

    A DataLoader has the order that its own arguments say.
    """
    kind = FUNCTIONS.get(cfg["type"]) if isinstance(cfg["type"], str) else cfg["type"]
    if kind is not DataLoader:
        return FUNCTIONS.build_function(cfg)
    arguments = {key: value for key, value in cfg.items() if key != "type"}
    arguments["dataset"] = _build_dataset(arguments["dataset"])
    if arguments.get("sampler") is not None:
        arguments["sampler"] = _build_sampler(arguments["sampler"], arguments["dataset"], {})
    return DataLoader(**resolve_functions(DataLoader, arguments))


def name_to_function(dataloader: Any) -> Any:
    """Return the function at an import path, and anything but a string unchanged."""
    return (
        FUNCTIONS.get(dataloader)
        if isinstance(dataloader, str) and "." in dataloader
        else dataloader
    )


def get_batch_axis(cfg_or_loader: object) -> object:
    """Return `batch_axis` of a config or its dataset, or of a loader or an iterable."""
    if is_mapping(cfg_or_loader) and "batch_axis" in cfg_or_loader:
        return cfg_or_loader["batch_axis"]
    return getattr(
        cfg_or_loader.get("dataset") if is_mapping(cfg_or_loader) else cfg_or_loader,
        "batch_axis",
        0,
    )


def check_dataloader(cfg: Mapping[str, Any]) -> None:
    """Check a dataloader section without building anything; see `build_dataloader`."""
    if "type" in cfg:
        return FUNCTIONS.check(cfg)
    cfg, _ = _take_schedules(cfg, 1)
    dataset = cfg.get("dataset")
    cfg = _divide_batch(cfg, 1)
    check_arguments(DataLoader, resolve_functions(DataLoader, cfg))
    if not isinstance(dataset, str) and not hasattr(dataset, "items") and not is_stream(dataset):
        require_map_style(dataset)
    sampler = cfg.get("sampler")
    is_config = sampler is None or isinstance(sampler, str) or hasattr(sampler, "items")
    if not is_config and not isinstance(sampler, Sampler):
        IteratedSampler(sampler)  # raises the error


class _GlobalBatch(NamedTuple):
    global_batch_size: Count


def _divide_batch(cfg: Mapping[str, Any], shards: int) -> dict[str, Any]:
    """Return the section with the `batch_size` of each shard of the data in the place of
    `global_batch_size`.
    """
    divided = dict(cfg.items())
    if "global_batch_size" not in divided:
        return divided
    size = divided.pop("global_batch_size")
    check_values("", _GlobalBatch, {"global_batch_size": size})
    if "batch_size" in divided or get_batch_axis(divided) is None:
        other = "`batch_size`" if "batch_size" in divided else "batch_axis=None"
        raise ConfigError(f"a dataloader must have either `global_batch_size` or {other}, got both")
    # Rounded down, another number of devices would train with another batch, and nobody would see
    # it.
    if size % shards:
        raise ConfigError(
            f"`{current_config_path() or 'dataloader'}.global_batch_size` must be a multiple of "
            f"{shards}, the number of data shards, got {size}"
        )
    return {**divided, "batch_size": size // shards}


def _require_batch_size(cfg: Mapping[str, Any]) -> None:
    if cfg.get("batch_size") is None and get_batch_axis(cfg) == 0:
        raise TypeError("DataLoader needs the argument 'batch_size'")


def _build_dataset(cfg: Any) -> Any:
    function = name_to_function(cfg)
    if isinstance(function, type) or function is cfg:
        cfg = as_config(cfg)
        return DATASETS.build(cfg) if is_mapping(cfg) else cfg
    dataset = function()
    # which is called for each pass over the stream
    return dataset if is_map_style(dataset) else function


def _build_stream(
    arguments: dict[str, Any], train: bool, process_index: int, process_count: int
) -> IterableLoader:
    """Return the loader for a dataset without access by index."""
    name = type(arguments["dataset"]).__name__
    for key in ("sampler", "num_workers", "num_threads", "prefetch_factor"):
        if arguments.pop(key, None):
            raise ConfigError(
                f"`{key}` must not be given for {name}, which has no access by index and is read "
                "in its own order; set it in the other library"
            )
    if arguments.pop("drop_last") is not train:
        raise ConfigError(
            f"`drop_last` must be {train} for {name}, which has no access by index: a smaller "
            "last batch is dropped in training and padded in evaluation"
        )
    _require_batch_size(arguments)
    # The stream divides itself by processes, since there is no sampler that could.
    shard: dict[str, Any] = {"process_index": process_index, "process_count": process_count}
    return IterableLoader(arguments.pop("dataset"), train, **arguments, **shard)


def _build_sampler(cfg: Any, dataset: Any, defaults: dict[str, Any]) -> Any:
    cfg = as_config(cfg)
    if not hasattr(cfg, "items"):
        return cfg
    kind = DATA_SAMPLERS.get_type(cfg.get("type"))
    parameters = inspect.signature(kind).parameters if callable(kind) else {}
    # and forwards them
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = [key for key in defaults if takes_all or key in parameters]
    # a seed in the config has precedence
    extra = {key: defaults[key] for key in names if cfg.get(key) is None}
    return DATA_SAMPLERS.build(
        {**{k: v for k, v in cfg.items() if k not in extra}, "dataset": dataset, **extra}
    )


def _check_shard(divided: object, index: int, count: int) -> None:
    """Raise ConfigError unless a sampler, or a loader of examples, reads exactly this process's
    share.
    """
    if not isinstance(divided, Sampler | IterableLoader) or (
        isinstance(divided, IterableLoader) and divided.is_batched
    ):
        return
    # A sampler that was built for another share gives all processes the same examples, in silence.
    if (divided.process_index, divided.process_count) != (index, count):
        raise ConfigError(
            f"`process_index` and `process_count` of {type(divided).__name__} must be {index} and "
            f"{count}, those of this process, got {divided.process_index} and "
            f"{divided.process_count}; its constructor gets them if it takes them, or **kwargs, "
            "and must pass them on"
        )
