"""Selection of the variables that an `NnxModel` trains, by a filter of `flax.nnx`."""

import collections
import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError, config_path
from jengine.config.registry import MODELS
from jengine.model.nnx import NnxFilter
from jengine.model.nnx_state import Path, named_leaves

if TYPE_CHECKING:
    from flax import nnx

logger = logging.getLogger("jengine")


def build_filter(wrt: NnxFilter) -> NnxFilter:
    """Return an nnx filter with import paths and configs in it replaced by what they stand for.

    >>> build_filter("flax.nnx.LoRAParam").__name__
    'LoRAParam'
    >>> build_filter([dict(type="flax.nnx.PathContains", key="head")])
    [PathContains('head', exact=True)]
    """
    if isinstance(wrt, str):
        return MODELS.get(wrt) if "." in wrt else wrt  # nnx reads a name as a tag of variables
    if is_mapping(wrt):
        return MODELS.build(wrt)
    # nnx reads a list as "any of these"; a config can only hold lists.
    if isinstance(wrt, list | tuple):
        built = []
        for i, item in enumerate(wrt):
            with config_path(i):
                built.append(build_filter(item))
        return built
    return wrt


def select_trained(module: "nnx.Module", wrt: NnxFilter) -> list[Path]:
    """Return the paths of the variables to train, which `wrt` selects.

    Random streams, statistics, caches and sown values are left out: filters by path
    (`nnx.PathContains`) select them with the parameters, but nothing of them can be trained.

    Raises:
      ConfigError: `wrt` selects nothing, or an array that is not floating-point.
    """
    from flax import nnx

    variables = nnx.to_flat_state(nnx.state(module))
    # Not "only nnx.Param": adapters may derive their variables from `nnx.Variable`.
    excluded = nnx.Any(nnx.RngState, nnx.BatchStat, nnx.Cache, nnx.Intermediate)
    given: Any = wrt
    is_selected = nnx.filterlib.to_predicate(nnx.All(given, nnx.Not(excluded)))
    selected = [
        (_names(path), variable) for path, variable in variables if is_selected(path, variable)
    ]
    if not selected:
        kinds = describe_types(variable for _, variable in variables)
        raise ConfigError(
            f"NnxModel: `wrt` must select parameters of the module, got {wrt!r}; it has {kinds}"
        )
    for path, variable in selected:
        for leaf in named_leaves(variable).values():
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ConfigError(
                    f"NnxModel: `wrt` must select floating-point parameters, got {'.'.join(path)} "
                    f"of the dtype {jnp.result_type(leaf)}; leave it out: it is then kept as it is"
                )
    return [path for path, _ in selected]


def announce_training(variables: Collection[Any]) -> None:
    """Log what is trained if there are parameters of several types: people mean to train some
    and to freeze others.
    """
    from flax import nnx

    special = sorted(
        {type(variable).__name__ for variable in variables if type(variable) is not nnx.Param}
    )
    if special and any(type(variable) is nnx.Param for variable in variables):
        kinds = describe_types(variables)
        wrt = " or ".join(f"wrt=nnx.{name}" for name in special)
        logger.info(
            "NnxModel: all parameters are trained: %s; %s trains one kind and freezes the others",
            kinds,
            wrt,
        )


def describe_types(variables: Iterable[Any]) -> str:
    """Return how many variables there are of each type: '4 Param, 2 LoRAParam'."""
    counts = collections.Counter(type(variable).__name__ for variable in variables)
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no variables"


def _names(path: Iterable[Any]) -> Path:
    return tuple(map(str, path))
