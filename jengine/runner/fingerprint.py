"""Describe everything that shapes a run, and compare a resumed run with its checkpoint."""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jengine.description import describe, flatten_description
from jengine.runner.runner_protocol import Runner

_FLAGS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
)  # fmt: skip
# Compared by kind, or different between any two runs.
_NOT_COMPARED = (
    "param_scheduler", "randomness", "resume", "resume_policy", "load_from", "work_dir", "experiment_name", "cfg",
)  # fmt: skip
_OPTIMIZER_KEYS = frozenset({"optimizer", "paramwise_cfg", "constructor"})  # compared by their effect on the groups
_CHAIN = re.compile(r"optim_wrapper\.(init|update|(.*\.)?parts)\.")  # of optax; its settings are those of a closure
_CODE = ".code"
_KINDS = (".type", ".function")


def describe_settings(arguments: Mapping[str, Any], cfg: Any) -> dict[str, Any]:
    """Return a description of the settings of a run, before anything of it has run.

    Args:
      arguments: of the Runner, objects or configs.
      cfg: the config that the user passed with them, or that they are from; None for none.
    """
    settings = {name: value for name, value in arguments.items() if name not in _NOT_COMPARED and value is not None}
    for name, value in (cfg or {}).items():
        if name not in _NOT_COMPARED and value is not arguments.get(name):
            settings[f"cfg.{name}" if name in arguments else name] = value
    return {**{name: describe(value) for name, value in settings.items()}, "jax.config": describe(read_flags())}


def read_flags() -> dict[str, Any]:
    """Return the options of jax that change numbers."""
    return {name: getattr(jax.config, name) for name in _FLAGS}


def collect_fingerprint(runner: Runner) -> dict[str, Any]:
    """Return what a checkpoint stores for the comparison: the settings, and the hashes of the training programs."""
    programs = runner.programs.hash_jaxprs() if runner.programs is not None else {}
    return {"settings": runner.settings, "python": _python_version(), "programs": programs}


def saved_hashes(path: str) -> dict[str, str]:
    """Return the hashes of the programs that trained the run of a checkpoint, see `TrainPrograms.hash_jaxprs`."""
    from jengine.checkpoint import read_meta

    return dict(read_meta(path).get("fingerprint", {}).get("programs", {}))


def compare_settings(runner: Runner, saved: Mapping[str, Any], *, skip_chains: bool) -> Iterator[tuple[str, str]]:
    """Yield the path of each setting that differs from the checkpoint, and a line with both values.

    Args:
      runner: the run.
      saved: the fingerprint in the checkpoint.
      skip_chains: leave out chains of optax, because a difference between the optimizers is reported already.
    """
    own, other = (flatten_description(settings) for settings in (runner.settings, saved["settings"]))
    is_same_python = saved["python"] == _python_version()
    replaced: list[str] = []  # whose arguments are others anyway
    for path in sorted(own.keys() | other.keys(), key=lambda path: (not path.endswith(_KINDS), path)):
        if own.get(path) == other.get(path) or (skip_chains and _CHAIN.match(path)):
            continue
        if path.startswith(tuple(replaced)):
            continue
        if path.endswith(_KINDS):
            replaced.append(f"{path.rpartition('.')[0]}.")
        if path.startswith("optim_wrapper.") and _is_compared_by_group(path, own):
            continue
        if not path.endswith(_CODE) or path not in own or path not in other:
            new, old = (repr(side[path]) if path in side else "nothing" for side in (own, other))
            yield path, f"{path}: {new} in the config, {old} in the checkpoint"
        elif is_same_python:  # another version compiles the same function to other code
            path = path.removesuffix(_CODE)
            yield path, f"{path}: the code of {own.get(f'{path}.function')} has changed since the checkpoint"


def _is_compared_by_group(path: str, settings: Mapping[str, Any]) -> bool:
    if _OPTIMIZER_KEYS.isdisjoint(path.split(".")):
        return False
    optimizer, found, _ = path.partition(".parts.")
    return not found or settings.get(f"{optimizer}.name") != "optax"


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
