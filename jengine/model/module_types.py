"""Types of modules, with what rules for parameters ask: the library's class, and the axes along
which layers stack.
"""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

Shape = tuple[int, ...]
Path = tuple[str, ...]

NORMS = ("BatchNorm", "SyncBatchNorm", "InstanceNorm", "GroupNorm", "LayerNorm")
_LAYERS = ("flax.linen.", "flax.nnx.nn.", "equinox.nn.")  # where libraries define their layers
_NOT_STACKED: tuple[Shape, Shape] = ((), ())
# what all modules derive from
_BASES = ("flax.linen.module", "flax.linen.transforms", "equinox.nn._stateful")


class ModuleType(str):
    """Class name of a module, a string.

    Attributes:
      kind: class name of the library's layer from which the class derives ('LayerNorm' for a
        subclass), else its own.
      stacked: axes of the module's parameters along which layers or experts are stacked, the same
        for all of them; negative ones count from the last axis. None if they are unknown.
    """

    kind: str
    stacked: Shape | None

    def __new__(cls, name: str, kind: str = "", stacked: Shape | None = None) -> "ModuleType":
        """Return the type; without `kind` it has its own name."""
        new = super().__new__(cls, name)
        new.kind = kind or name
        new.stacked = stacked
        return new


def find_module_type(cls: type, stacked: Shape | None = None) -> ModuleType:
    """Return the type of a module class.

    >>> from flax import linen as nn
    >>> class MyNorm(nn.LayerNorm):
    ...     pass
    >>> find_module_type(MyNorm), find_module_type(MyNorm).kind
    ('MyNorm', 'LayerNorm')
    """
    return ModuleType(
        cls.__name__, next((base.__name__ for base in cls.__mro__ if _is_layer(base)), ""), stacked
    )


def kind_of(name: str | None) -> str:
    """Return the `ModuleType.kind` of a type; a name that a user has given is its own.

    '' for None.
    """
    return name.kind if isinstance(name, ModuleType) else name or ""


def is_norm(name: str | None) -> bool:
    """Return whether a type is a batch, instance, group or layer norm.

    As in MMEngine, RMSNorm is not included.
    """
    return kind_of(name).startswith(NORMS)


def is_batch_norm(name: str) -> bool:
    """Return whether a type is a batch norm, of a library or by its name."""
    return "BatchNorm" in kind_of(name) or "BatchNorm" in name


def layer_shape(shape: Shape, stacked: Sequence[int]) -> Shape:
    """Return the shape of one layer of a parameter whose axes `stacked` are layers or experts.

    >>> layer_shape((12, 768, 3072), (0,))
    (768, 3072)
    """
    axes = {axis % len(shape) for axis in stacked if -len(shape) <= axis < len(shape)}
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def stacked_axes(types: Mapping[str, str], path: str) -> Shape | None:
    """Return the axes along which layers are stacked in the parameter at a dotted path.

    None if the types do not tell.

    They are those of its module, or of the innermost one around it that is stacked.

    >>> stacked_axes(
    ...     {"blocks": ModuleType("Block", stacked=(0,)), "head": ModuleType("Dense")},
    ...     "blocks.gamma",
    ... )
    (0,)
    """
    parts = path.split(".")[:-1]
    kinds = [types.get(".".join(parts[:count])) for count in range(len(parts), -1, -1)]
    known = [kind.stacked if isinstance(kind, ModuleType) else None for kind in kinds]
    return known[0] if known[0] is not None else next(filter(None, known), None)


def find_stacked(shapes: Sequence[tuple[Shape, Shape]]) -> Shape:
    """Return the axes that the parameters of a module have and a single layer has not.

    The first ones if it is unclear.

    >>> (
    ...     find_stacked([((12, 4, 8), (4, 8)), ((12, 8), (8,))]),
    ...     find_stacked([((4, 3, 8), (4, 8)), ((8, 3), (8,))]),
    ... )
    ((0,), (1,))

    Args:
      shapes: of each parameter, and of the same parameter in a single layer.
    """
    counts = {len(shape) - len(layer) for shape, layer in shapes}
    if len(counts) != 1 or (count := counts.pop()) < 1:
        return ()
    ndim = min(len(shape) for shape, _ in shapes)
    for axes in (range(ndim), range(-1, -ndim - 1, -1)):
        for stacked in itertools.combinations(axes, count):
            if all(layer_shape(shape, stacked) == layer for shape, layer in shapes):
                return stacked
    return ()


def find_module_types(
    modules: Mapping[Path, tuple[type, Mapping[str, Any], Mapping[str, Shape]]],
    layer_shapes: Callable[[str, Mapping[str, Any]], dict[str, Shape]],
) -> dict[str, ModuleType]:
    """Return the types of NNX or Equinox modules by dotted path.

    A layer of a library says how large its parameters are. A module of the user
    whose layers are all stacked is stacked as a whole, and so are the modules inside it, if the
    sizes fit.

    Args:
      modules: by path, parents first, the class, the attributes, and the shapes of the module's own
        parameters by name.
      layer_shapes: from the kind and the attributes of a layer of a library, the shapes of its
        parameters by name.
    """
    stacks: dict[Path, tuple[Shape, Shape]] = {}  # axes and their sizes, where they are known
    for path, (cls, attributes, shapes) in modules.items():
        layers = (
            layer_shapes(find_module_type(cls).kind, attributes)
            if any(map(_is_layer, cls.__mro__))
            else {}
        )
        pairs = [(shape, layers[name]) for name, shape in shapes.items() if name in layers]
        if pairs:
            axes = find_stacked(pairs)
            stacks[path] = axes, _sizes(pairs[0][0], axes)
    known = dict(stacks)
    for path, (_, _, shapes) in modules.items():
        if path in known:
            continue
        below = {stack for inner, stack in known.items() if inner[: len(path)] == path}
        parent = next(
            (stacks[path[:n]] for n in reversed(range(len(path))) if path[:n] in stacks),
            _NOT_STACKED,
        )
        if not below and parent == _NOT_STACKED:
            continue
        axes, sizes = below.pop() if len(below) == 1 else _NOT_STACKED if below else parent
        is_fitting = all(
            len(shape) >= len(axes) and _sizes(shape, axes) == sizes for shape in shapes.values()
        )
        stacks[path] = (axes, sizes) if is_fitting else _NOT_STACKED
    known_axes = {path: axes for path, (axes, _) in stacks.items()}
    return {
        ".".join(path): find_module_type(cls, known_axes.get(path))
        for path, (cls, _, _) in modules.items()
    }


def _is_layer(cls: type) -> bool:
    name = cls.__module__ + "."
    if not name.startswith(_LAYERS) or cls.__module__ in _BASES:
        return False
    # A class that a transformation of Flax has derived, such as that of `nn.remat`, is not in its
    # module
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


def _sizes(shape: Shape, axes: Shape) -> Shape:
    return tuple(shape[axis] for axis in axes if -len(shape) <= axis < len(shape))


def has_equinox_modules(tree: Any) -> bool:
    """Return whether a tree is or contains an `eqx.Module`."""
    equinox = sys.modules.get("equinox")  # if it is not loaded, no tree can contain its modules
    if equinox is None:
        return False
    is_module = lambda node: isinstance(node, equinox.Module)  # noqa: E731
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))
