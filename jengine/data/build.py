"""Build a loader from the dataloader section of a config."""

import inspect
from collections.abc import Mapping
from typing import Any

from jengine.data.iterables import IterableLoader
from jengine.data.loader import DataLoader
from jengine.data.samplers import DefaultSampler
from jengine.errors import config_path
from jengine.registry import DATA_SAMPLERS, DATASETS, as_config, check_arguments

# Settings of MMEngine's configs that do not exist here, and why.
_UNSUPPORTED = {
    "persistent_workers": "workers stay alive between epochs",
    "pin_memory": "batches are sent to the device before they are needed",
    "batch_sampler": "the sampler returns the order of the samples, and batch_size divides it",
}


def build_dataloader(
    cfg_or_loader: Any, *, train: bool, seed: int = 0, process_index: int = 0, process_count: int = 1
) -> DataLoader | IterableLoader:
    """Build a loader from a config, or adapt an existing one.

    Args:
      cfg_or_loader: a dict of `DataLoader`'s arguments, in which `dataset` and `sampler` may be dicts with a `type`;
        or a loader; or any iterable of batches with a length. It is not modified.
      train: whether the data are for training. By default the order is then shuffled and `drop_last` is True;
        otherwise the data are in order and the last batch is padded.
      seed: seed of the sampler, unless the config has one.
      process_index: index of this process.
      process_count: number of processes that share the data.

    Returns:
      A sized loader with `set_epoch(epoch, start=0)` that yields numpy pytrees.

    Raises:
      TypeError: an unknown or missing argument, or an iterable without a length. ValueError: a number out of range.
    """
    if isinstance(cfg_or_loader, DataLoader | IterableLoader):
        return cfg_or_loader
    if not isinstance(cfg_or_loader, Mapping) and not hasattr(cfg_or_loader, "items"):
        return IterableLoader(cfg_or_loader, train)
    arguments: dict[str, Any] = {"drop_last": train, "sampler": None, **dict(cfg_or_loader.items())}
    check_dataloader(arguments)
    with config_path("dataset"):
        arguments["dataset"] = as_config(arguments["dataset"])
        if hasattr(arguments["dataset"], "items"):
            arguments["dataset"] = DATASETS.build(arguments["dataset"])
    defaults: dict[str, Any] = {"seed": seed, "process_index": process_index, "process_count": process_count}
    with config_path("sampler"):
        arguments["sampler"] = _build_sampler(arguments["sampler"], arguments["dataset"], train, defaults)
    return DataLoader(**arguments)


def check_dataloader(cfg: Mapping[str, Any]) -> None:
    """Check a dataloader section without building anything; see `build_dataloader`."""
    for key, reason in _UNSUPPORTED.items():
        if key in cfg:
            raise TypeError(f"a dataloader must not have the argument {key!r}: {reason}; remove it")
    check_arguments(DataLoader, dict(cfg.items()))


def _build_sampler(cfg: Any, dataset: Any, train: bool, defaults: dict[str, Any]) -> Any:
    cfg = as_config(cfg)
    if cfg is None:
        return DefaultSampler(dataset, shuffle=train, **defaults)
    if not hasattr(cfg, "items"):
        return cfg
    kind = cfg.get("type")
    if isinstance(kind, str):
        with config_path("type"):
            kind = DATA_SAMPLERS.get(kind)
    parameters = inspect.signature(kind).parameters if callable(kind) else {}
    extra = {key: value for key, value in defaults.items() if key in parameters and cfg.get(key) is None}
    return DATA_SAMPLERS.build({**{k: v for k, v in cfg.items() if k not in extra}, "dataset": dataset, **extra})
