"""Show a model as a tree of modules through its parameters, for rules to walk through.

Names and types follow what `torch.nn.Module` offers, so that a constructor written for PyTorch needs few edits.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jengine import paths

_NORMS = ("BatchNorm", "SyncBatchNorm", "InstanceNorm", "GroupNorm", "LayerNorm")


@dataclasses.dataclass
class Parameter:
    """Describe one leaf of the parameter tree.

    Attributes:
      path: its dotted path.
      shape: its shape.
      dtype: its dtype.
      requires_grad: whether it is trained.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool = True

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)


@dataclasses.dataclass
class Module:
    """Describe a node of the parameter tree.

    Attributes:
      path: its dotted path, empty for the root.
      type: its class name; None for a bare pytree, where names must do.
      parameters: its own parameters by name.
      children: the modules below it by name.
    """

    path: str = ""
    type: str | None = None
    parameters: dict[str, Parameter] = dataclasses.field(default_factory=dict)
    children: dict[str, "Module"] = dataclasses.field(default_factory=dict)

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Yield pairs of name (dotted, below this module) and parameter."""
        yield from self.parameters.items()
        if recurse:
            for name, child in self.children.items():
                for below, parameter in child.named_parameters():
                    yield f"{name}.{below}", parameter

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        """Yield pairs of name and module."""
        yield from self.children.items()

    def is_norm(self) -> bool:
        """Return whether it normalises by batch, instance, group or layer; RMSNorm, as in MMEngine, does not count."""
        if self.type is not None:
            return any(self.type.startswith(norm) for norm in _NORMS)
        leaves = self.parameters
        if "scale" not in leaves or any(p.ndim != 1 for p in leaves.values()):
            return False
        return set(leaves) <= {"scale", "bias"} and "rms" not in self.path.rpartition(".")[2].lower()

    def is_conv(self) -> bool:
        """Return whether it is a two-dimensional convolution."""
        kernel = self.parameters.get("kernel")
        if kernel is None or kernel.ndim != 4:
            return False
        return self.type is None or ("Conv" in self.type and "Transpose" not in self.type)

    def is_depthwise_conv(self) -> bool:
        """Return whether it is a two-dimensional convolution with one input channel a group, kernel (h, w, 1, out)."""
        return self.is_conv() and self.parameters["kernel"].shape[2] == 1

    def is_deformable_conv(self) -> bool:
        """Return whether its class is a deformable convolution."""
        return self.type is not None and "DeformConv" in self.type


def module_tree(params: Any, module_types: Mapping[str, str] | None = None) -> Module:
    """Return the modules of a parameter tree, in the order in which the model defines them.

    Args:
      params: pytree of arrays or ShapeDtypeStructs.
      module_types: dotted module path -> class name, as `Model.module_types`.

    Returns:
      The root. Within a module a bias comes last, as PyTorch has it.
    """
    types = dict(module_types or {})
    root = Module(type=types.get("", "") if types else None)
    leaves = paths.flatten(params)
    rank = {path: i for i, path in enumerate([*types, *_as_inserted(params)])}
    for path in sorted(leaves, key=lambda p: _order(p, rank)):
        *modules, name = path.split(".")
        module = root
        for depth, part in enumerate(modules, start=1):
            below = ".".join(modules[:depth])
            # a model that knows its types but not this one has a plain container here, which is no fallback case
            kind = types.get(below, "") if types else None
            module = module.children.setdefault(part, Module(below, kind))
        leaf = leaves[path]
        module.parameters[name] = Parameter(path, tuple(leaf.shape), leaf.dtype)
    return root


def _as_inserted(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all nodes, dicts in their own order: JAX sorts them, a model orders them by meaning."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            path = f"{prefix}.{key}" if prefix else str(key)
            yield path
            yield from _as_inserted(value, path)
    else:
        yield from (f"{prefix}.{path}" if prefix and path else path for path in paths.flatten(tree))


def _order(path: str, rank: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Return a sort key: at each level of the path the rank of the node, biases last among the leaves of a module."""
    parts = path.split(".")
    nodes = [".".join(parts[: n + 1]) for n in range(len(parts))]
    is_bias = int(parts[-1] == "bias")
    return tuple((is_bias if node == path else 0, rank.get(node, len(rank))) for node in nodes)
