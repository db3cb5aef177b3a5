"""Matching of pretrained weights to model parameters, with the conversion that each array needs.

A name is compared as it is stored, after `rename`. If there is no such parameter, module numbers may be written either
way (`layers_3`, `layers.3`), and PyTorch names are tried: see the tables here and in `torch_layout`. A tensor that is
stored as `weight` has PyTorch's axes: if it becomes a `kernel`, these are permuted.

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
from jengine.checkpoint.report import LoadReport, describe, invert
from jengine.checkpoint.rules import check_patterns, matches, rename_paths
from jengine.checkpoint.torch_layout import TorchLayout, is_statistic, param_layouts, statistic_layouts

Structs = Mapping[str, jax.ShapeDtypeStruct]
Convert = Callable[[np.ndarray], np.ndarray]
Key = tuple[str | None, str]  # the item of a training state, None if the source does not tell, and the path in it
Found = tuple[str, int | None]  # the name of a stored array, and which third of it; None for the whole array

ITEMS = ("params", "model_state")
_PROJECTIONS = ("query", "key", "value")
_TORCH_PROJECTIONS = {
    "query": ("q_proj",), "key": ("k_proj",), "value": ("v_proj",), "out": ("proj", "out_proj", "o_proj"),
}  # fmt: skip
_COUNTER = "num_batches_tracked"  # a buffer of PyTorch's batch norms


class Assignment(NamedTuple):
    """Stored array for a parameter; without `convert` it is used as it is, apart from the dtype."""

    item: str
    path: str
    stored: str
    convert: Convert | None


class _Parameter(NamedTuple):
    item: str
    path: str
    shown: str  # the path in messages
    struct: jax.ShapeDtypeStruct
    layout: TorchLayout
    aliases: tuple[Found, ...]  # other names


def match(
    stored: Structs,
    target: Mapping[str, Structs],
    rename: Sequence[tuple[str, str]] = (),
    exclude: Sequence[str] = (),
    interpolate: Sequence[str] = (),
    interpolation: Method = "bicubic",
) -> tuple[list[Assignment], LoadReport]:
    """Match stored arrays to parameters.

    Args:
      stored: by name.
      target: the parameters by item ('params' and 'model_state') and path.
      rename, exclude, interpolate, interpolation: see `load_pretrained`.

    Returns:
      The assignments, and the report with paths below the item.

    Raises:
      ValueError: a rule matches nothing, or makes two names equal.
    """
    keys, ignored = _find_items(stored, target)
    new_paths = rename_paths(tuple(dict.fromkeys(path for _, path in keys.values())), rename)
    renamed = {name: (item, new_paths[path]) for name, (item, path) in keys.items()}
    find = _build_index(renamed)
    parameters = list(_list_parameters(target))
    check_patterns("exclude", exclude, [*(p.path for p in parameters), *new_paths.values()])
    check_patterns("interpolate", interpolate, [p.path for p in parameters])

    assignments, used, excluded, missing = [], set[str](), list[str](), list[str]()
    matched, mismatched, reshaped, cast, resizable = {}, {}, {}, {}, list[str]()
    for parameter in parameters:
        found, shown = find(parameter), parameter.shown
        if found is not None:
            used.add(found[0])  # also if it is excluded: it is not unexpected
        if matches(parameter.path, *exclude):
            excluded.append(shown)
        elif found is None:
            missing.append(shown)
        else:
            name, third = found
            source, expected = stored[name], parameter.struct
            method = interpolation if matches(parameter.path, *interpolate) else None
            fits, convert = _find_conversion(parameter, name, third, source, method)
            if not fits:
                mismatched[shown] = describe(source), describe(expected)
                if "pos" in parameter.path and find_grids(tuple(source.shape), expected.shape):
                    resizable.append(shown)
                continue
            assignments.append(Assignment(parameter.item, parameter.path, name, convert))
            matched[shown] = keys[name][1]
            if convert is not None:
                reshaped[shown] = str(source.shape), str(expected.shape)
            elif source.dtype != expected.dtype:
                cast[shown] = describe(source), describe(expected)
    rest = [name for name in keys if name not in used]
    counters = [name for name in rest if name.rpartition(".")[2] == _COUNTER]
    others = [renamed[name][1] for name in rest if name not in counters]
    return assignments, LoadReport(
        matched=matched,
        missing=tuple(missing),
        unexpected=tuple(path for path in others if not matches(path, *exclude)),
        mismatched=mismatched,
        cast=cast,
        reshaped=reshaped,
        excluded=tuple(excluded),
        ignored=(*counters, *ignored),
        resizable=tuple(resizable),
    )


def _build_index(keys: Mapping[str, Key]) -> Callable[[_Parameter], Found | None]:
    """Return a function that finds the stored array for a parameter."""
    exact = invert(keys)
    aliases: dict[Key, str | None] = {}  # None where several arrays have the same alias
    for name, (item, path) in keys.items():
        alias = (item, _number_modules(path))
        aliases[alias] = None if alias in aliases else name

    def find(parameter: _Parameter) -> Found | None:
        scopes = (parameter.item, None)  # None: the source does not tell parameters from state
        for scope in scopes:
            for path in (parameter.path, f"{parameter.path}.value"):  # Orbax has the levels of Flax's wrappers
                if (scope, path) in exact:
                    return exact[scope, path], None
        for alias, third in parameter.aliases:
            for scope in scopes:
                if (name := aliases.get((scope, alias))) is not None:
                    return name, third
        return None

    return find


def _find_items(names: Iterable[str], target: Mapping[str, Structs]) -> tuple[dict[str, Key], list[str]]:
    """Return the key of each weight by name, and the names that are not weights, such as optimizer state."""
    tops = {item: {path.partition(".")[0] for path in target[item]} for item in ITEMS}
    collections = {*tops["model_state"], "batch_stats"}
    split = [(name, *name.partition(".")[::2]) for name in names]
    if "params" in tops["params"] or all(top != "params" for _, top, _ in split):
        return {name: (None, name) for name, _, _ in split}, []
    keys: dict[str, Key] = {}
    ignored = []
    for name, top, rest in split:
        if top in ITEMS:
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
            shown = path if item == "params" or path not in target["params"] else f"{item}.{path}"
            names = (_number_modules(path), None), (layouts[path].name, None), *_attention_aliases(path, attentions)
            yield _Parameter(item, path, shown, struct, layouts[path], names)


def _attention_aliases(path: str, attentions: set[str]) -> Iterator[Found]:
    """Yield the PyTorch names of a parameter that belongs to one of the `attentions`."""
    *parents, module, leaf = ("", *path.split("."))
    prefix = "".join(f"{parent}." for parent in parents[1:])
    if prefix not in attentions or leaf not in ("kernel", "bias"):
        return
    prefix, kind = _number_modules(prefix), "weight" if leaf == "kernel" else "bias"
    for name in _TORCH_PROJECTIONS.get(module, ()):
        yield f"{prefix}{name}.{kind}", None
    if module in _PROJECTIONS:
        third = _PROJECTIONS.index(module)
        yield from ((f"{prefix}qkv.{kind}", third), (f"{prefix}in_proj_{kind}", third))


def _find_conversion(
    parameter: _Parameter, name: str, third: int | None, source: jax.ShapeDtypeStruct, method: Method | None
) -> tuple[bool, Convert | None]:
    """Return whether the stored array fits a parameter, and how to convert it; `method` resizes position embeddings."""
    expected, layout = parameter.struct, parameter.layout
    floats = jnp.issubdtype(source.dtype, jnp.floating) and jnp.issubdtype(expected.dtype, jnp.floating)
    shape = tuple(source.shape)
    if (source.dtype != expected.dtype and not floats) or (third is not None and (not shape or shape[0] % 3)):
        return False, None
    if third is not None:
        shape = (shape[0] // 3, *shape[1:])
    is_permuted = layout.axes != tuple(range(len(layout.axes)))
    is_torch = third is not None or name.endswith("weight")
    if shape == expected.shape and third is None and not (is_torch and is_permuted):
        return True, None
    if (is_torch or not is_permuted) and _squeeze(shape) == _squeeze(layout.shape):
        return True, functools.partial(_from_torch, third=third, layout=layout, shape=expected.shape)
    if not is_torch and _squeeze(shape) == _squeeze(expected.shape):
        return True, functools.partial(np.reshape, shape=expected.shape)
    if method is not None and find_grids(shape, expected.shape):
        return True, functools.partial(resize_positions, shape=expected.shape, method=method)
    return False, None


def _from_torch(array: np.ndarray, third: int | None, layout: TorchLayout, shape: tuple[int, ...]) -> np.ndarray:
    if third is not None:
        array = np.split(array, 3)[third]
    return layout.to_flax(array.reshape(layout.shape), shape)


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _number_modules(path: str) -> str:
    """Return the path with module numbers as segments: `layers.3.kernel` for `layers_3.kernel`."""
    return re.sub(r"_(\d+)(?=\.)", r".\1", path)
