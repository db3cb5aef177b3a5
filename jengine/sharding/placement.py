"""Map parameter paths to shardings: which axis of which parameter is divided over which axis of the mesh."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh, PartitionSpec

from jengine import paths
from jengine.errors import ConfigError, closest, config_path
from jengine.optim.param_groups.param_group import did_you_mean

logger = logging.getLogger("jengine")

COLUMNS = ("parameter", "shape", "placed by", "divided as", "MiB per device")
Axis = str | tuple[str, ...] | None


class Rule(NamedTuple):
    """Hold a part of a name, and the division of the parameters that match it."""

    key: str
    axes: tuple[Axis, ...]  # for each axis of the array, an axis of the mesh, several of them, or None


class Placed(NamedTuple):
    """Hold the division of one parameter, and its reason."""

    spec: PartitionSpec
    reason: str  # the key of the rule, 'logical axes', 'fsdp' or '' (a copy on every device)


class Placement:
    """Decide how each parameter is divided.

    The longest rule whose key is part of the parameter's name, as Flax or as PyTorch spells it, alone decides; then the
    logical axes that the model gave the parameter; then, for large ones, the `fsdp` axis along the largest axis of the
    array that it divides. Every device has a copy of the others.

    Args:
      mesh: the mesh.
      rules: `(key, axes)` pairs: `('mlp.up.kernel', (None, 'tensor'))`; missing axes are None.
      logical_axes: name of a logical axis -> axis of the mesh; a name that is an axis of the mesh stands for itself.
      fsdp_min_size: number of elements from which a parameter is divided over `fsdp` without a rule.
      strict: a rule that matches nothing is an error, not a warning.
      axes: the axes over which parameters may be divided; None for all.

    Raises:
      ConfigError: rules that are not such pairs, or that name an axis outside of the mesh or of `axes`.
    """

    def __init__(
        self,
        mesh: Mesh,
        rules: Sequence[tuple[str, Sequence[Axis]]] = (),
        logical_axes: Mapping[str, Axis] | None = None,
        fsdp_min_size: int = 2**18,
        strict: bool = False,
        axes: Sequence[str] | None = None,
    ) -> None:
        self.mesh = mesh
        self._axes = tuple(mesh.axis_names if axes is None else axes)
        with config_path("rules"):
            self._rules = [self._rule(rule) for rule in rules]
        self._rules.sort(key=lambda rule: (-len(rule.key), rule.key))
        self._logical = dict(logical_axes or {})
        with config_path("logical_axes"):
            for axis in self._logical.values():
                self._check_axis(axis)
        self._fsdp_min_size = fsdp_min_size
        self._strict = strict

    def place(self, params: Any, logical_axes: Mapping[str, Sequence[Axis]] | None = None) -> dict[str, Placed]:
        """Return the division of every parameter, by dotted path.

        Args:
          params: pytree of arrays or ShapeDtypeStructs.
          logical_axes: dotted path -> name of each axis, several, or None, as given by the model.

        Raises:
          ConfigError: a rule that does not fit a parameter that it matches; or, under `strict`, matches nothing.
        """
        leaves = paths.flatten(params)
        used: set[str] = set()
        placed = {
            path: self._one(path, leaf.shape, (logical_axes or {}).get(path), used) for path, leaf in leaves.items()
        }
        for rule in self._rules:
            if rule.key not in used and not any(_matches(rule.key, path) for path in leaves):
                text = f"rules: {rule.key!r} matches no parameter{did_you_mean(rule.key, leaves)}"
                if self._strict:
                    raise ConfigError(text)
                logger.warning(text)
        return placed

    def _one(self, path: str, shape: tuple[int, ...], names: Sequence[Axis] | None, used: set[str]) -> Placed:
        rule = next((rule for rule in self._rules if _matches(rule.key, path)), None)
        if rule is not None:
            used.add(rule.key)
            return Placed(self._spec(path, shape, rule.axes, f"the rule {rule.key!r}"), rule.key)
        if names is not None:
            axes = tuple(self._logical_axis(name) for name in names)
            return Placed(self._spec(path, shape, axes, f"its logical axes {tuple(names)}"), "logical axes")
        axis = self._fsdp_axis(shape)
        if axis is None:
            return Placed(PartitionSpec(), "")
        return Placed(PartitionSpec(*(None,) * axis, "fsdp"), "fsdp")

    def _logical_axis(self, name: Axis) -> Axis:
        """Return the axis of the mesh, or several, of a logical axis, if any."""
        if not isinstance(name, tuple):
            return self._logical.get(name, name if name in self._axes else None) if name else None
        axes = [self._logical_axis(part) for part in name]
        return tuple(part for axis in axes for part in ((axis,) if isinstance(axis, str) else axis or ())) or None

    def _fsdp_axis(self, shape: tuple[int, ...]) -> int | None:
        """Return the largest axis that the devices of `fsdp` divide, if the parameter is large."""
        count = self.mesh.shape.get("fsdp", 1)
        if count == 1 or math.prod(shape) < self._fsdp_min_size:
            return None
        fitting = [axis for axis, size in enumerate(shape) if size % count == 0]
        return max(fitting, key=lambda axis: shape[axis], default=None)

    def _spec(self, path: str, shape: tuple[int, ...], axes: Sequence[Axis], source: str) -> PartitionSpec:
        if len(axes) > len(shape):
            raise ConfigError(f"{source} has {len(axes)} axes, the parameter {path!r} {len(shape)}: {shape}")
        for size, axis in zip(shape, axes, strict=False):
            names = (axis,) if isinstance(axis, str) else axis or ()
            count = math.prod(self.mesh.shape[name] for name in names)
            if size % count:
                raise ConfigError(
                    f"{source} divides an axis of {size} of the parameter {path!r} {shape} over {count} devices "
                    f"({axis})"
                )
        used = [name for axis in axes for name in ((axis,) if isinstance(axis, str) else axis or ())]
        if len(set(used)) < len(used):
            raise ConfigError(f"{source} uses an axis of the mesh twice: {tuple(axes)}")
        return PartitionSpec(*axes)

    def _rule(self, rule: Any) -> Rule:
        if not isinstance(rule, Sequence) or isinstance(rule, str) or len(rule) != 2 or not isinstance(rule[0], str):
            raise ConfigError(
                f"a rule must be a pair of a part of a name and axes, ('kernel', (None, 'tensor')), got {rule!r}"
            )
        key, axes = rule
        if isinstance(axes, str) or not isinstance(axes, Sequence):
            raise ConfigError(f"the axes of the rule {key!r} must be a tuple, one entry for each axis, got {axes!r}")
        for axis in axes:
            self._check_axis(axis)
        return Rule(key, tuple(tuple(axis) if isinstance(axis, list) else axis for axis in axes))

    def _check_axis(self, axis: Axis) -> None:
        for name in (axis,) if isinstance(axis, str) else axis or ():
            if name not in self.mesh.axis_names:
                raise ConfigError(f"the mesh has no axis {name!r}{closest(str(name), self.mesh.axis_names)}")
            if name not in self._axes:
                instead = f": take {' or '.join(self._axes)}" if self._axes else ""
                raise ConfigError(f"each part of {name!r} has all parameters, they are not divided over it{instead}")


def placement_table(placed: Mapping[str, Placed], params: Any, mesh: Mesh) -> list[list[str]]:
    """Return the rows under COLUMNS: divided parameters, and one row for all parameters with a copy on every device."""
    leaves = paths.flatten(params)
    rows, copied = [], 0
    for path, (spec, reason) in placed.items():
        leaf = leaves[path]
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        names = [name for axis in spec for name in ((axis,) if isinstance(axis, str) else axis or ())]
        if not names:
            copied += size
            continue
        share = size / math.prod(mesh.shape[name] for name in names)
        rows.append([path, str(tuple(leaf.shape)), reason, str(tuple(spec)), f"{share / 2**20:.2f}"])
    whole = len(placed) - len(rows)
    return [*rows, [f"{whole} with a copy on every device", "", "", "", f"{copied / 2**20:.2f}"]] if whole else rows


def _matches(key: str, path: str) -> bool:
    return any(key in spelling for spelling in paths.spellings(path))
