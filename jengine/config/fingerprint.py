"""Settings of a run, described in each checkpoint, and compared with it by a resumed run."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jengine.config.annotations import parameters_of
from jengine.config.description import Unwritable, describe, flatten_description
from jengine.config.json_codec import Json

_FLAGS = (
    "jax_enable_x64",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
)
# Different between any two runs, or compared elsewhere
_NOT_COMPARED = (
    "randomness",
    "resume",
    "load_from",
    "work_dir",
    "experiment_name",
    "log_level",
    "cfg",
)


def describe_run(
    constructor: Callable[..., Any], arguments: Mapping[str, Any], cfg: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Json]]:
    """Describe a run before anything has run.

    Args:
      constructor: the Runner.
      arguments: all of the constructor's.
      cfg: the config passed with them, if there is one.

    Returns:
      The description for config.py; and the settings for checkpoints, by path.
    """
    parameters = parameters_of(constructor)
    given = {
        name: value
        for name, value in (arguments if cfg is None else cfg).items()
        if cfg is not None or (value is not parameters[name].default and name != "resume")
    }
    if _is_in_memory(given.get("load_from")):  # a file of megabytes would help nobody
        given["load_from"] = Unwritable("weights in memory")
    config = describe(given)
    settings = {
        name: config[name] if value is given.get(name, ...) else describe(value)
        for name, value in arguments.items()
        if name not in _NOT_COMPARED and value is not None
    }
    # A Runner from a config gets its sections as arguments too; only what differs from them, or is
    # more, is compared a second time.
    for name, value in given.items():
        if name not in _NOT_COMPARED and value is not arguments.get(name):
            settings[f"cfg.{name}" if name in arguments else name] = config[name]
    settings["jax.config"] = read_flags()
    flat = flatten_description({key: value for key, value in settings.items() if value is not None})
    return config, {**flat}


def _is_in_memory(load_from: Any) -> bool:
    is_options = hasattr(load_from, "items") and "path" in load_from
    weights = load_from["path"] if is_options else load_from
    return weights is not None and not isinstance(weights, str | os.PathLike)


def read_flags() -> dict[str, Any]:
    """Return the jax options that change numbers."""
    return {name: getattr(jax.config, name) for name in _FLAGS}


def compare_settings(
    settings: dict[str, Json], saved: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the path and both values of each of the described `settings` that differs from the
    fingerprint `saved`.
    """
    stored = flatten_description(saved["settings"])  # nested in early checkpoints
    replaced: list[str] = []  # objects of another kind, so that their arguments differ anyway
    for path in sorted(
        settings.keys() | stored.keys(), key=lambda path: (not path.endswith(".type"), path)
    ):
        if settings.get(path) == stored.get(path) or path.startswith(tuple(replaced)):
            continue
        if path in settings and path in stored:
            replaced.append(path.removesuffix("type") if path.endswith(".type") else f"{path}.")
        new, old = (repr(side[path]) if path in side else "not set" for side in (settings, stored))
        yield path, f"{path}: {new} in the config, {old} in the checkpoint"
