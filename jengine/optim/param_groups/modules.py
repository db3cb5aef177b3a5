"""Parameters of a model, and the types of the modules that own them."""

import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from jengine.config import paths
from jengine.config.plugins import load_provided
from jengine.model.model import Model
from jengine.model.module_types import (
    has_equinox_modules,
    is_norm,
    kind_of,
    layer_shape,
    stacked_axes,
)
from jengine.model.nnx_state import list_module_types
from jengine.model.roles import LEAST_AXES, Role, last_name, roles_by_name

_RMS_NAME = re.compile(r"(?<!no)rms", re.IGNORECASE)  # but `norms`


class HasParams(Protocol):
    """An object with parameters, and optionally `module_types`."""

    @property
    def params(self) -> Any:
        """The parameters."""


ParamsSource: TypeAlias = Any | HasParams | Model  # an nnx.State or nnx.Module, too


@dataclasses.dataclass
class Parameter:
    """A leaf in the parameter tree."""

    path: str  # dotted
    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool = True  # whether it is trained
    # axes along which layers are stacked; None if the types do not tell
    known_axes: tuple[int, ...] | None = None
    find_roles: Callable[[], Mapping[str, Role]] = dict

    @property
    def role(self) -> Role | None:
        """The role, None if it cannot be told."""
        return self.find_roles().get(self.path)

    @functools.cached_property
    def stacked(self) -> tuple[int, ...]:
        """The axes along which layers are stacked."""
        if self.known_axes is not None:
            return tuple(axis % len(self.shape) for axis in self.known_axes)
        return self.role.stacked if self.role is not None else ()

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape in one layer, without the axes along which `nn.scan` or `nn.vmap` stacks layers
        or experts.

        Rules by shape use it: a bias is a vector in whatever number of layers.
        """
        return layer_shape(self.shape, self.stacked)

    @property
    def ndim(self) -> int:
        """The number of axes in one layer."""
        return len(self.layer_shape)

    @property
    def is_flat(self) -> bool:
        """Whether it is a vector in each layer, or by its role a bias or in a norm."""
        # a bias of attention has axes for heads and their sizes, which is one axis in PyTorch
        if self.ndim < 2:
            return self.ndim == 1
        return self.role is not None and self.role.kind in ("norm", "bias")

    @property
    def has_layer_axis(self) -> bool:
        """Whether layers are stacked along the first axis.

        Without module types, whether it is one axis too many.
        """
        if self.known_axes is None and not self.stacked:
            return len(self.shape) > LEAST_AXES.get(self.path.rpartition(".")[2], 0)
        return bool(self.shape) and any(axis % len(self.shape) == 0 for axis in self.stacked)


@dataclasses.dataclass
class Module:
    """A node in the parameter tree."""

    path: str = ""  # dotted, empty for the root
    # class name; None for a bare pytree, in which only names and shapes are available
    type: str | None = None
    # the module's own, by name
    parameters: dict[str, Parameter] = dataclasses.field(default_factory=dict)
    children: dict[str, "Module"] = dataclasses.field(default_factory=dict)  # by name

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Yield (name, parameter) pairs; names are dotted and relative to this module."""
        yield from self.parameters.items()
        if recurse:
            for name, child in self.children.items():
                for path, parameter in child.named_parameters():
                    yield f"{name}.{path}", parameter

    def walk(self) -> Iterator["Module"]:
        """Yield this module and all modules below it, in model order."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        """Yield (name, module) pairs."""
        yield from self.children.items()

    def is_norm(self) -> bool:
        """Return whether it is a batch, instance, group or layer norm.

        As in MMEngine, RMSNorm is not included.
        """
        if self.type is not None:
            return is_norm(self.type)
        return bool(self.parameters) and all(map(is_norm_by_role, self.parameters.values()))

    def is_conv(self) -> bool:
        """Return whether it is a two-dimensional convolution."""
        kernel = self.parameters.get("kernel")
        if kernel is None or kernel.ndim != 4:
            return False
        kind = kind_of(self.type)
        return self.type is None or ("Conv" in kind and "Transpose" not in kind)

    def is_depthwise_conv(self) -> bool:
        """Return whether it is a 2-D convolution with one input channel per group, kernel (h, w,
        1, out).
        """
        # A convolution of a gray image has the same shape; Flax does not store the number of groups
        # in parameters.
        return self.is_conv() and self.parameters["kernel"].layer_shape[2] == 1

    def is_deformable_conv(self) -> bool:
        """Return whether it is a deformable convolution, by class name."""
        return self.type is not None and "DeformConv" in self.type


def is_norm_by_role(parameter: Parameter) -> bool:
    """Return whether a parameter is in a norm other than RMSNorm, where no module type tells."""
    *module, name = parameter.path.split(".")
    is_rms = any(_RMS_NAME.search(part) for part in (last_name(".".join(module)), name))
    return not is_rms and parameter.role is not None and parameter.role.kind == "norm"


def module_tree(
    params: Any,
    module_types: Mapping[str, str] | None = None,
    roles: Callable[[], Mapping[str, Role]] | None = None,
) -> Module:
    """Return the root module of a parameter tree, with children in the order in which the model
    defines them.

    Within a module the bias comes last, as in PyTorch.

    Args:
      params: pytree of arrays or ShapeDtypeStructs.
      module_types: dotted module path -> class name, like `Model.module_types`, which also tell
        stacked layers. Where they do not, the roles do.
      roles: function that returns the roles of the parameters; by default by names and shapes.
    """
    types = dict(module_types or {})
    roles = functools.cache(roles or functools.partial(roles_by_name, params, types))
    root = Module(type=types.get("", "") if types else None)
    leaves = paths.flatten(params)
    # `params` may have passed `jax.jit`
    defined = [prefix for path in types for prefix in _prefixes(path)]
    rank = {path: i for i, path in enumerate(dict.fromkeys([*defined, *_iterate_paths(params)]))}
    for path in sorted(leaves, key=lambda p: _sort_key(p, rank)):
        *modules, name = path.split(".")
        module = root
        for depth, key in enumerate(modules, start=1):
            module_path = ".".join(modules[:depth])
            # if types are given, a path without a type is a plain container, so names and shapes
            # are not used for it
            module_type = types.get(module_path, "") if types else None
            module = module.children.setdefault(key, Module(module_path, module_type))
        leaf = leaves[path]
        module.parameters[name] = Parameter(
            path,
            tuple(leaf.shape),
            leaf.dtype,
            known_axes=stacked_axes(types, path),
            find_roles=roles,
        )
    return root


def get_params(
    source: ParamsSource, module_types: Mapping[str, str] | None = None
) -> tuple[Any, Mapping[str, str]]:
    """Return the parameters to train, and the module types by dotted path, empty if unknown.

    Args:
      source: a pytree of arrays or ShapeDtypeStructs; an `nnx.State` or `nnx.Module`, whose
        `nnx.Param`s are the parameters; modules of Equinox, whose floating-point arrays are; or an
        object with such a tree as `params` (and optionally `module_types`).
      module_types: dotted module path -> class name; takes precedence over the types in `source`.

    Raises:
      TypeError: `source` has no parameters.
    """
    nnx = sys.modules.get("flax.nnx")  # if it is not loaded, `source` cannot be one of its objects
    if nnx is not None and isinstance(source, nnx.Module):
        return _select_params(
            nnx, nnx.state(source), type(source).__name__
        ), module_types or list_module_types(source)
    # before `params`: a state has its keys as attributes
    if nnx is not None and isinstance(source, nnx.State):
        return _select_params(nnx, source, "an nnx.State"), module_types or {}
    # Anything with this attribute, such as a TrainState.
    if hasattr(source, "params"):
        params, own_types = get_params(source.params)
        return params, module_types or getattr(source, "module_types", None) or own_types
    if isinstance(source, Model):
        name = type(source).__name__
        raise TypeError(
            f"the parameters must be given, got a {name}, which has none before `init`; write "
            "`params, model_state = model.init(rng, batch)` and pass `params` with "
            "`module_types=model.module_types`"
        )
    if has_equinox_modules(source):
        params, own_types = load_provided("module_trees", "select_params")(source)
        return params, module_types or own_types
    for path, leaf in paths.leaves_with_path(source):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            hint = f" at {path!r}" if path else "; pass the parameters that its `init` returns"
            raise TypeError(
                "the parameters must be a pytree of arrays, an nnx.State or an nnx.Module, "
                f"got {type(leaf).__name__}{hint}"
            )
    return source, module_types or {}


def _iterate_paths(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield all node paths, with dicts in insertion order, which is the model's; JAX sorts keys."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            path = f"{prefix}.{key}" if prefix else str(key)
            yield path
            yield from _iterate_paths(value, path)
    else:
        yield from (f"{prefix}.{path}" if prefix and path else path for path in paths.flatten(tree))


def _prefixes(path: str) -> list[str]:
    """Return a module path's prefixes, from the outermost container to the module."""
    return list(itertools.accumulate(path.split("."), "{}.{}".format))


def _sort_key(path: str, rank: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Return the node rank at each path level, with biases last among a module's leaves."""
    # PyTorch registers weight before bias, and groups are numbered by first appearance.
    is_bias = int(path.rpartition(".")[2] == "bias")
    return tuple(
        (is_bias if node == path else 0, rank.get(node, len(rank))) for node in _prefixes(path)
    )


def _select_params(nnx: Any, state: Any, name: str) -> Any:
    """Return the `nnx.Param`s in a state.

    A state of bare arrays, such as optax receives, has only parameters.
    """
    variables = [leaf for _, leaf in nnx.to_flat_state(state) if isinstance(leaf, nnx.Variable)]
    if not variables:
        return state
    # Batch statistics and RNG counters are variables too; an optimizer must not have them.
    params = nnx.filter_state(state, nnx.Param)
    if not nnx.to_flat_state(params):
        types = ", ".join(sorted({type(variable).__name__ for variable in variables}))
        raise TypeError(f"the parameters must be of type nnx.Param, got {name} with only {types}")
    return params
