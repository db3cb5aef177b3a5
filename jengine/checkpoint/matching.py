"""Match the arrays of pretrained weights to those of a model, and decide how each of them is converted.

A name is compared as it is stored, after `rename`. If there is no such parameter, module numbers may be written either
way (`layers_3`, `layers.3`), and the names of PyTorch are tried: see the tables here and in `torch_layout`. A tensor
that is stored as `weight` has PyTorch's axes: if it becomes a `kernel`, these are permuted.

| Flax | PyTorch |
|---|---|
| attention `query`, `key`, `value` | `q_proj`, `k_proj`, `v_proj`; or a third each of `qkv` or `in_proj_weight` |
| attention `out` | `proj`, `out_proj`, `o_proj` |
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.checkpoint.interpolation import Method, find_grids, resize_positions
from jengine.checkpoint.report import LoadReport, describe
from jengine.checkpoint.rules import check_patterns, matches, rename_paths
from jengine.checkpoint.torch_layout import TorchLayout, is_statistic, param_layouts, statistic_layouts

Structs = Mapping[str, jax.ShapeDtypeStruct]
Key = tuple[str | None, str]  # the item of a training state, None if the source does not tell, and the path in it

ITEMS = ("params", "model_state")
_PROJECTIONS = ("query", "key", "value")
_TORCH_PROJECTIONS = {
    "query": ("q_proj",), "key": ("k_proj",), "value": ("v_proj",), "out": ("proj", "out_proj", "o_proj"),
}  # fmt: skip
_COUNTER = "num_batches_tracked"  # a buffer of PyTorch's batch norms


class Settings(NamedTuple):
    """Hold the rules of a match.

    Attributes:
      rename: (old, new) prefixes of stored paths, see `rules`.
      exclude: patterns of parameters that keep their values.
      interpolate: patterns of position embeddings that may be resized.
      interpolation: how they are resized.
    """

    rename: Sequence[tuple[str, str]] = ()
    exclude: Sequence[str] = ()
    interpolate: Sequence[str] = ()
    interpolation: Method = "bicubic"


class Assignment(NamedTuple):
    """Assign a stored array to a parameter.

    Attributes:
      item, path: the parameter.
      stored: the name of the array.
      convert: the conversion of the array; None if it is used as it is, apart from its dtype.
    """

    item: str
    path: str
    stored: str
    convert: Callable[[np.ndarray], np.ndarray] | None


class _Parameter(NamedTuple):
    """Describe a parameter of the model: where it is, its type, and under which names it may be stored.

    Attributes:
      item, path: the parameter.
      shown: its path in messages.
      struct: its shape and dtype.
      layout: its name and axes in PyTorch.
      aliases: other names, each with the third of the array that it is; None for all of it.
    """

    item: str
    path: str
    shown: str
    struct: jax.ShapeDtypeStruct
    layout: TorchLayout
    aliases: tuple[tuple[str, int | None], ...]


class _Found(NamedTuple):
    """Describe where the value of a parameter is stored: the array, and which third of it (None for all of it)."""

    stored: str
    third: int | None = None


def match(stored: Structs, target: Mapping[str, Structs], settings: Settings) -> tuple[list[Assignment], LoadReport]:
    """Match stored arrays to parameters.

    Args:
      stored: by name.
      target: the parameters by item ('params' and 'model_state') and path.
      settings: the rules.

    Returns:
      The assignments and the report, whose paths are those in the item.

    Raises:
      ValueError: a rule that matches nothing, or that makes two names equal.
    """
    keys, ignored = _find_items(stored, target)
    new_paths = rename_paths(tuple(dict.fromkeys(path for _, path in keys.values())), settings.rename)
    index = _Index({name: (item, new_paths[path]) for name, (item, path) in keys.items()})
    parameters = list(_list_parameters(target))
    check_patterns("exclude", settings.exclude, [*(p.path for p in parameters), *new_paths.values()])
    check_patterns("interpolate", settings.interpolate, [p.path for p in parameters])

    assignments, used, excluded, missing = [], set[str](), list[str](), list[str]()
    matched, mismatched, reshaped, cast, resizable = {}, {}, {}, {}, list[str]()
    for parameter in parameters:
        found, shown = index.find(parameter), parameter.shown
        if found is not None:
            used.add(found.stored)
        if _matches_any(parameter.path, settings.exclude):
            excluded.append(shown)
        elif found is None:
            missing.append(shown)
        else:
            source = stored[found.stored]
            assignment = _assign(parameter, found, source, settings)
            types = describe(source), describe(parameter.struct)
            if assignment is None:
                mismatched[shown] = types
                if "pos" in parameter.path and find_grids(tuple(source.shape), parameter.struct.shape):
                    resizable.append(shown)
                continue
            assignments.append(assignment)
            matched[shown] = keys[found.stored][1]
            if assignment.convert is not None:
                reshaped[shown] = str(source.shape), str(parameter.struct.shape)
            elif source.dtype != parameter.struct.dtype:
                cast[shown] = types
    rest = [name for name in keys if name not in used]
    counters = [name for name in rest if name.rpartition(".")[2] == _COUNTER]
    others = [index.keys[name][1] for name in rest if name not in counters]
    return assignments, LoadReport(
        matched=matched,
        missing=tuple(missing),
        unexpected=tuple(path for path in others if not _matches_any(path, settings.exclude)),
        mismatched=mismatched,
        cast=cast,
        reshaped=reshaped,
        excluded=tuple(excluded),
        ignored=(*counters, *ignored),
        resizable=tuple(resizable),
    )


class _Index:
    """Find stored arrays by name.

    Args:
      keys: where each array is, after `rename`, by the name under which it is stored.
    """

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self.keys = keys
        self._exact: dict[Key, str] = {}
        self._aliases: dict[Key, str | None] = {}  # None for several arrays
        for name, key in keys.items():
            if key in self._exact:
                raise ValueError(
                    f"`rename` must keep paths distinct, got {key[1]!r} for both {self._exact[key]!r} and {name!r}"
                )
            self._exact[key] = name
            alias = (key[0], _number_modules(key[1]))
            self._aliases[alias] = None if alias in self._aliases else name

    def find(self, parameter: _Parameter) -> _Found | None:
        """Return where the value of `parameter` is stored; None if it is not."""
        scopes = (parameter.item, None)
        for scope in scopes:
            for path in (parameter.path, f"{parameter.path}.value"):  # Orbax has the levels of Flax's wrappers
                if (scope, path) in self._exact:
                    return _Found(self._exact[scope, path])
        for alias, third in parameter.aliases:
            for scope in scopes:
                name = self._aliases.get((scope, alias))
                if name is not None:
                    return _Found(name, third)
        return None


def _find_items(names: Iterable[str], target: Mapping[str, Structs]) -> tuple[dict[str, Key], list[str]]:
    """Return the key of each weight by name, and the names that are not weights, such as the state of an optimizer."""
    tops = {item: {path.partition(".")[0] for path in target[item]} for item in ITEMS}
    collections = {*tops["model_state"], "batch_stats"}
    split = [(name, *name.partition(".")[::2]) for name in names]
    has_items = "params" not in tops["params"] and any(top == "params" for _, top, _ in split)
    keys: dict[str, Key] = {}
    ignored = []
    for name, top, rest in split:
        if not has_items:
            keys[name] = (None, name)
        elif top in ITEMS:
            keys[name] = (top, rest)
        elif top in collections:
            keys[name] = ("model_state", name)
        else:
            ignored.append(name)
    return keys, ignored


def _list_parameters(target: Mapping[str, Structs]) -> Iterator[_Parameter]:
    for item in ITEMS:
        leaves = target[item]
        statistics = {path: leaf for path, leaf in leaves.items() if item == "model_state" and is_statistic(path)}
        layouts = {**param_layouts(leaves), **statistic_layouts(statistics)}
        parents = {path.removesuffix("query.kernel") for path in leaves if path.endswith("query.kernel")}
        attentions = {p for p in parents if all(f"{p}{name}.kernel" in leaves for name in _PROJECTIONS)}
        for path, struct in leaves.items():
            aliases = ((_number_modules(path), None), (layouts[path].name, None))
            shown = path if item == "params" or path not in target["params"] else f"{item}.{path}"
            parameter = _Parameter(item, path, shown, struct, layouts[path], aliases)
            yield parameter._replace(aliases=(*aliases, *_attention_aliases(parameter, attentions)))


def _attention_aliases(parameter: _Parameter, attentions: set[str]) -> Iterator[tuple[str, int | None]]:
    """Yield other names of the parameter in PyTorch, if it belongs to one of the `attentions`."""
    *parents, module, leaf = ("", *parameter.path.split("."))
    prefix = "".join(f"{parent}." for parent in parents[1:])
    if prefix not in attentions or leaf not in ("kernel", "bias"):
        return
    prefix, kind = _number_modules(prefix), "weight" if leaf == "kernel" else "bias"
    for name in _TORCH_PROJECTIONS.get(module, ()):
        yield f"{prefix}{name}.{kind}", None
    if module in _PROJECTIONS:
        third = _PROJECTIONS.index(module)
        yield f"{prefix}qkv.{kind}", third
        yield f"{prefix}in_proj_{kind}", third


def _assign(
    parameter: _Parameter, found: _Found, source: jax.ShapeDtypeStruct, settings: Settings
) -> Assignment | None:
    """Return the assignment of a stored array; None if its shape or dtype does not fit."""
    expected = parameter.struct
    floats = jnp.issubdtype(source.dtype, jnp.floating) and jnp.issubdtype(expected.dtype, jnp.floating)
    if source.dtype != expected.dtype and not floats:
        return None
    shape, layout, third = tuple(source.shape), parameter.layout, found.third
    if third is not None:
        if not shape or shape[0] % 3:
            return None
        shape = (shape[0] // 3, *shape[1:])
    is_permuted = layout.axes != tuple(range(len(layout.axes)))
    is_torch = third is not None or found.stored.endswith("weight")
    convert: Callable[[np.ndarray], np.ndarray] | None
    if shape == expected.shape and third is None and not (is_torch and is_permuted):
        convert = None
    elif (is_torch or not is_permuted) and _squeeze(shape) == _squeeze(layout.shape):
        convert = functools.partial(_from_torch, third=third, layout=layout, shape=expected.shape)
    elif not is_torch and _squeeze(shape) == _squeeze(expected.shape):
        convert = functools.partial(np.reshape, shape=expected.shape)
    elif _matches_any(parameter.path, settings.interpolate) and find_grids(shape, expected.shape):
        convert = functools.partial(resize_positions, shape=expected.shape, method=settings.interpolation)
    else:
        return None
    return Assignment(parameter.item, parameter.path, found.stored, convert)


def _from_torch(array: np.ndarray, third: int | None, layout: TorchLayout, shape: tuple[int, ...]) -> np.ndarray:
    if third is not None:
        array = np.split(array, 3)[third]
    return layout.to_flax(array.reshape(layout.shape), shape)


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _number_modules(path: str) -> str:
    """Return the path with the numbers of modules as segments of their own: `layers.3.kernel` for `layers_3.kernel`."""
    return re.sub(r"_(\d+)(?=\.)", r".\1", path)


def _matches_any(path: str, patterns: Sequence[str]) -> bool:
    return any(matches(path, pattern) for pattern in patterns)
