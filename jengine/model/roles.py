"""Roles of parameters: what each does in its model, and what its axes are."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.model.module_types import kind_of, layer_shape, stacked_axes

KINDS = (
    *("embedding", "position", "input", "hidden", "head", "norm", "bias", "scale"),
    *("convolution", "depthwise", "router", "adapter"),
)


@dataclasses.dataclass(frozen=True)
class Role:
    """What a parameter does in its model, and what its axes are.

    Attributes:
      kind: one of `KINDS`.
      fan_in: axes over which the layer sums; of a convolution the spatial and the input axes.
      fan_out: axes of the outputs.
      stacked: axes along which layers or experts are stacked.
      heads: the axis of attention heads, if the array has one.
      parts: number of fused projections of equal size along the first axis in `fan_out`, such as 3
        for queries, keys and values.
    """

    kind: str
    fan_in: tuple[int, ...] = ()
    fan_out: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()
    heads: int | None = None
    parts: int = 1


def parameter_roles(
    model: Any, params: Any, overrides: Mapping[str, Any] | None = None
) -> dict[str, Role]:
    """Return the role of each parameter by dotted path.

    Args:
      model: the `Model`, for which `init` has been called or traced; None if only the parameters
        are known.
      params: pytree of arrays or ShapeDtypeStructs.
      overrides: roles by path pattern, with wildcards.
    """
    types = getattr(model, "module_types", {})
    roles = {}
    for path, leaf in paths.flatten(params).items():
        stacked = tuple(axis % len(leaf.shape) for axis in stacked_axes(types, path) or ())
        axes = tuple(axis for axis in range(len(leaf.shape)) if axis not in stacked)
        shape = layer_shape(leaf.shape, stacked)
        module, _, name = path.rpartition(".")
        if "embedding" in name or kind_of(types.get(module)) == "Embed":
            roles[path] = Role("embedding", axes[:1], axes[1:], stacked)
        elif len(shape) < 2:
            is_norm = "norm" in (types.get(module, "") + module).lower()
            roles[path] = Role("norm" if is_norm else "bias", (), axes, stacked)
        else:
            is_head = re.search(r"(head|logits|classifier)\b", path)
            kind = "head" if is_head else "convolution" if len(shape) == 4 else "hidden"
            roles[path] = Role(kind, axes[:-1], axes[-1:], stacked)
    for pattern in overrides or {}:
        raise ConfigError(f"`roles` must be paths of parameters, got {pattern!r}")
    return roles
