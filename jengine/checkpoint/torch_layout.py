"""How parameters are called and how they lie in PyTorch.

| Flax | PyTorch |
|---|---|
| Dense `kernel` (in, out) | Linear `weight` (out, in) |
| Conv `kernel` (*window, in / groups, out) | Conv `weight` (out, in / groups, *window) |
| attention `query`, `key`, `value`: `kernel` (in, heads, size), `bias` (heads, size) | Linear (heads * size, in) |
| attention `out`: `kernel` (heads, size, out) | Linear `weight` (out, heads * size) |
| norm `scale`, Embed `embedding` | `weight`, unchanged |
| batch norm `mean`, `var` in the model state | `running_mean`, `running_var` |

Everything else keeps its name and its layout. What a kernel belongs to is told from its rank and from its neighbours,
for neither a checkpoint nor a bare pytree knows the types of modules.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jengine.paths import torch_alias

STATISTICS = {"mean": "running_mean", "var": "running_var"}


class TorchForm(NamedTuple):
    """What a tensor is called in PyTorch, and how its axes lie there."""

    name: str
    merged: tuple[int, ...]  # the shape in Flax, attention heads merged with their size
    axes: tuple[int, ...]  # the axes of `merged` in PyTorch's order

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in PyTorch."""
        return tuple(self.merged[axis] for axis in self.axes)

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """A parameter of Flax as PyTorch has it, contiguous."""
        return np.asarray(array.reshape(self.merged).transpose(self.axes), order="C")  # the file takes raw memory

    def to_flax(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor of PyTorch as Flax has it, in the shape of the parameter."""
        return np.asarray(tensor.transpose(np.argsort(self.axes)).reshape(shape), order="C")


def param_forms(params: Mapping[str, Any]) -> dict[str, TorchForm]:
    """The form of each parameter.

    Args:
      params: arrays or ShapeDtypeStructs by dotted path.
    """
    shapes = {path: shape_of(leaf) for path, leaf in params.items()}
    attentions = {_split(path)[0] for path in shapes if _is_query(path, shapes)}
    return {path: _param_form(path, shape, attentions) for path, shape in shapes.items()}


def _param_form(path: str, shape: tuple[int, ...], attentions: set[str]) -> TorchForm:
    name, rank = torch_alias(path), len(shape)
    parent, module, leaf = _split(path)
    if parent in attentions:
        if module in ("query", "key", "value") and (leaf, rank) == ("bias", 2):
            return TorchForm(name, (shape[0] * shape[1],), (0,))
        if module in ("query", "key", "value") and (leaf, rank) == ("kernel", 3):
            return TorchForm(name, (shape[0], shape[1] * shape[2]), (1, 0))
        if module == "out" and (leaf, rank) == ("kernel", 3):
            return TorchForm(name, (shape[0] * shape[1], shape[2]), (1, 0))
    if leaf == "kernel" and rank >= 2:
        return TorchForm(name, shape, (rank - 1, rank - 2, *range(rank - 2)))
    return TorchForm(name, shape, tuple(range(rank)))


def _is_query(path: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether `path` is an attention's query kernel: keys, values and an output of its heads lie beside it."""
    if _split(path)[1:] != ("query", "kernel") or len(shapes[path]) != 3:
        return False
    around = path.removesuffix("query.kernel")
    key, value, out = (shapes.get(f"{around}{name}.kernel", ()) for name in ("key", "value", "out"))
    return len(key) == len(value) == len(out) == 3 and out[:2] == shapes[path][1:]


def _split(path: str) -> tuple[str, str, str]:
    """What a module lies in, its own name, and the name of its parameter."""
    *parent, module, leaf = ("", *path.split("."))
    return ".".join(parent), module, leaf


def statistic_forms(statistics: Mapping[str, Any]) -> dict[str, TorchForm]:
    """The form of each running statistic.

    Args:
      statistics: arrays or ShapeDtypeStructs by dotted path in the model state.
    """
    forms = {}
    for path, leaf in statistics.items():
        modules, _, kind = torch_alias(path.removeprefix("batch_stats.")).rpartition(".")
        shape = shape_of(leaf)
        forms[path] = TorchForm(".".join(filter(None, (modules, STATISTICS[kind]))), shape, tuple(range(len(shape))))
    return forms


def is_statistic(path: str) -> bool:
    """Whether what is at `path` of a model state is a running statistic of a batch norm."""
    return path.rpartition(".")[2] in STATISTICS


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of an array, a ShapeDtypeStruct or a number."""
    return tuple(getattr(leaf, "shape", ()))


def check_unique(forms: Iterable[tuple[str, TorchForm]]) -> None:
    """Raises ValueError if two of `forms`, given with their paths, have the same name."""
    first: dict[str, str] = {}
    for path, form in forms:
        if form.name in first:
            raise ValueError(f"{first[form.name]!r} and {path!r} are both {form.name!r} in PyTorch; rename one of them")
        first[form.name] = path
