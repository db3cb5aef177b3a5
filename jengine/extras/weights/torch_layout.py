"""PyTorch names and axis orders for Flax parameters.

| Flax | PyTorch |
|---|---|
| Dense `kernel` (in, out) | Linear `weight` (out, in) |
| Conv `kernel` (*window, in / groups, out) | Conv `weight` (out, in / groups, *window) |
| attention `query`, `key`, `value`: `kernel` (in, heads, size) | Linear (heads * size, in) |
| their names | `q_proj`, `k_proj`, `v_proj`; or a third each of `qkv`, `in_proj_weight` |
| attention `out`: `kernel` (heads, size, out) | Linear `weight` (out, heads * size) |
| name of attention `out` | `proj`, `out_proj`, `o_proj` |
| norm `scale`, Embed `embedding` | `weight`, unchanged |
| batch norm `mean`, `var` in the model state | `running_mean`, `running_var` |

Everything else keeps name and layout. Neither a checkpoint nor a pytree stores module types, so the
kernel type is inferred from the rank and the neighbors.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jengine.config.paths import torch_alias

# another name of a parameter, and which third of that array it is; None for all of it
Alias = tuple[str, int | None]

STATISTICS = {"mean": "running_mean", "var": "running_var"}
_PROJECTIONS = ("query", "key", "value")
_TORCH_PROJECTIONS = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "out": ("proj", "out_proj", "o_proj"),
}


class Layout(NamedTuple):
    """Names and axis order that another library gives a parameter."""

    name: str
    merged: tuple[int, ...]  # the shape here, with attention heads merged with their size
    axes: tuple[int, ...]  # the axes of `merged` in the library's order
    aliases: tuple[Alias, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the library."""
        return tuple(self.merged[axis] for axis in self.axes)

    @property
    def is_permuted(self) -> bool:
        """Whether the axes are in another order in the library."""
        return self.axes != tuple(range(len(self.axes)))

    def to_flax(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Convert an array of the library to the `shape` of the parameter."""
        # `argsort` inverts a permutation
        return np.asarray(array.transpose(np.argsort(self.axes)).reshape(shape), order="C")


def torch_layouts(item: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Layout]:
    """Return PyTorch's name, axes and other names of each parameter, or entry of the model state.

    Args:
      item: 'params' or 'model_state'.
      shapes: by dotted path.
    """
    structs = {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in shapes.items()}
    layouts = param_layouts(structs)
    if item == "model_state":
        layouts |= statistic_layouts({p: leaf for p, leaf in structs.items() if is_statistic(p)})
    # Attention is recognized by its members, since a module called `query` alone may be anything.
    parents = {
        path.removesuffix("query.kernel") for path in shapes if path.endswith("query.kernel")
    }
    attentions = {p for p in parents if all(f"{p}{name}.kernel" in shapes for name in _PROJECTIONS)}
    return {
        path: layout._replace(aliases=tuple(_attention_aliases(path, attentions)))
        for path, layout in layouts.items()
    }


def to_torch(layout: Layout, array: np.ndarray) -> np.ndarray:
    """Convert a Flax parameter to PyTorch's layout, contiguous."""
    # the file stores raw memory
    return np.asarray(array.reshape(layout.merged).transpose(layout.axes), order="C")


def param_layouts(params: Mapping[str, Any]) -> dict[str, Layout]:
    """Return the layout of each parameter; `params` has arrays or ShapeDtypeStructs by dotted path.

    >>> layout = param_layouts({"fc.kernel": np.zeros((3, 10))})["fc.kernel"]
    >>> layout.name, layout.shape
    ('fc.weight', (10, 3))
    """
    shapes = {path: np.shape(leaf) for path, leaf in params.items()}
    attentions = {_split_path(path)[0] for path in shapes if _is_attention_query(path, shapes)}
    return {path: _param_layout(path, shape, attentions) for path, shape in shapes.items()}


def statistic_layouts(statistics: Mapping[str, Any]) -> dict[str, Layout]:
    """Return the layout of each running statistic, given by dotted path in the model state."""
    layouts = {}
    for path, leaf in statistics.items():
        module, _, kind = torch_alias(path.removeprefix("batch_stats.")).rpartition(".")
        shape = np.shape(leaf)
        name = ".".join(filter(None, (module, STATISTICS[kind])))
        # Statistics are vectors: only their names differ, running_mean for mean.
        layouts[path] = Layout(name, shape, tuple(range(len(shape))))
    return layouts


def check_unique(layouts: Iterable[tuple[str, Layout]]) -> None:
    """Raise ValueError if two pairs of path and layout have the same name."""
    paths: dict[str, str] = {}
    for path, layout in layouts:
        if (other := paths.setdefault(layout.name, path)) is not path:
            raise ValueError(
                f"{other!r} and {path!r} are both named {layout.name!r} in PyTorch; rename one of "
                "them"
            )


def is_statistic(path: str) -> bool:
    """Return whether `path` in a model state is a batch-norm statistic."""
    return path.rpartition(".")[2] in STATISTICS


def _attention_aliases(path: str, attentions: set[str]) -> Iterator[Alias]:
    """Yield the PyTorch names of a parameter that belongs to one of the `attentions`."""
    *parents, module, leaf = ["", *path.split(".")]
    prefix = "".join(f"{parent}." for parent in parents[1:])
    if prefix not in attentions or leaf not in ("kernel", "bias"):
        return
    prefix = number_modules(prefix)
    kind = "weight" if leaf == "kernel" else "bias"
    for name in _TORCH_PROJECTIONS.get(module, ()):
        yield f"{prefix}{name}.{kind}", None
    if module in _PROJECTIONS:
        third = _PROJECTIONS.index(module)
        # PyTorch stores the three projections in one tensor, under timm's name or under that of
        # nn.MultiheadAttention.
        yield from ((f"{prefix}qkv.{kind}", third), (f"{prefix}in_proj_{kind}", third))


def _param_layout(path: str, shape: tuple[int, ...], attentions: set[str]) -> Layout:
    name = torch_alias(path)
    rank = len(shape)
    parent, module, leaf = _split_path(path)
    if parent in attentions:
        if module in ("query", "key", "value") and (leaf, rank) == ("bias", 2):
            return Layout(name, (shape[0] * shape[1],), (0,))
        if module in ("query", "key", "value") and (leaf, rank) == ("kernel", 3):
            return Layout(name, (shape[0], shape[1] * shape[2]), (1, 0))
        if module == "out" and (leaf, rank) == ("kernel", 3):
            return Layout(name, (shape[0] * shape[1], shape[2]), (1, 0))
    if leaf == "kernel" and rank >= 2:
        # the window is empty for a Dense
        return Layout(name, shape, (rank - 1, rank - 2, *range(rank - 2)))
    return Layout(name, shape, tuple(range(rank)))


def _is_attention_query(path: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether `path` is an attention's query kernel, with key, value and output kernels
    next to it.
    """
    if _split_path(path)[1:] != ("query", "kernel") or len(shapes[path]) != 3:
        return False
    parent = path.removesuffix("query.kernel")
    key, value, out = (shapes.get(f"{parent}{name}.kernel", ()) for name in ("key", "value", "out"))
    # Names alone may be a coincidence: heads and sizes must agree
    return len(key) == len(value) == len(out) == 3 and out[:2] == shapes[path][1:]


def _split_path(path: str) -> tuple[str, str, str]:
    """Return the path of the parent module, the module name, and the parameter name."""
    *parent, module, leaf = ["", *path.split(".")]
    return ".".join(parent), module, leaf


def number_modules(path: str) -> str:
    """Return the path with module numbers as segments: `layers.3.kernel` for `layers_3.kernel`."""
    return re.sub(r"_(\d+)(?=\.)", r".\1", path)
