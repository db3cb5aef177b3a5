"""Find the parameters of a model and the types of the modules that own them."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jengine import paths
from jengine.model.model import Model

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


def params_of(source: Any, module_types: Mapping[str, str] | None = None) -> tuple[Any, Mapping[str, str]]:
    """Return the parameters to train and the types of their modules.

    Args:
      source: a pytree of arrays or ShapeDtypeStructs; an `nnx.State` or `nnx.Module`, of which the `nnx.Param`s are
        the parameters; or an object that has such a tree as `params` (and perhaps `module_types`).
      module_types: dotted module path -> class name; takes precedence over the types of `source`.

    Returns:
      The parameters and the types by dotted module path, empty if unknown.

    Raises:
      TypeError: `source` holds no parameters.
    """
    nnx = sys.modules.get("flax.nnx")  # not loaded: `source` cannot be one of its objects
    if nnx is not None and isinstance(source, nnx.Module):
        types = {".".join(map(str, path)): type(node).__name__ for path, node in nnx.iter_modules(source)}
        return _trained(nnx, nnx.state(source), type(source).__name__), module_types or types
    if nnx is not None and isinstance(source, nnx.State):  # before `params`: a state has its keys as attributes
        return _trained(nnx, source, "an nnx.State"), module_types or {}
    if hasattr(source, "params"):
        params, known = params_of(source.params)
        return params, module_types or getattr(source, "module_types", None) or known
    if isinstance(source, Model):
        name = type(source).__name__
        raise TypeError(
            f"the parameters must be given, got a {name}, which has none before `init`; write "
            "`params, model_state = model.init(rng, batch)` and pass `params` with `module_types=model.module_types`"
        )
    for path, leaf in paths.leaves_with_path(source):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            where = f" at {path!r}" if path else "; pass the parameters that its `init` returns"
            raise TypeError(
                "the parameters must be a pytree of arrays, an nnx.State or an nnx.Module, "
                f"got {type(leaf).__name__}{where}"
            )
    return source, module_types or {}


def _trained(nnx: Any, state: Any, name: str) -> Any:
    """Return the `nnx.Param`s of a state; a state of bare arrays, as optax gets it, holds parameters alone."""
    variables = [leaf for _, leaf in nnx.to_flat_state(state) if isinstance(leaf, nnx.Variable)]
    if not variables:
        return state
    params = nnx.filter_state(state, nnx.Param)
    if not nnx.to_flat_state(params):
        found = ", ".join(sorted({type(variable).__name__ for variable in variables}))
        raise TypeError(f"the parameters must be of type nnx.Param, got {name} with {found} alone")
    return params
