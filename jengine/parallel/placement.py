"""Placement of parameters on a mesh, by rules, logical axes or size."""

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh, PartitionSpec

from jengine.config import paths
from jengine.config.errors import ConfigError, config_path
from jengine.model.model import Params
from jengine.parallel.mesh import OPTIONAL_AXES

logger = logging.getLogger("jengine")

Axis = str | tuple[str, ...] | None
Rules = Sequence[tuple[str, Sequence[Axis] | PartitionSpec]]


class Placed(NamedTuple):
    """Sharding of one parameter, and the reason."""

    spec: PartitionSpec
    reason: str  # the key of the rule, 'logical axes', 'fsdp' or '' (replicated)


class Placement:
    """Rules for how each parameter is sharded.

    The first match applies: the longest rule whose key is part of the parameter's Flax or PyTorch
    name; the logical axes that the model has set; for a large parameter, `fsdp` along the largest
    divisible axis. Others are replicated.

    Args:
      mesh: the mesh.
      rules: `(key, axes)` pairs: `('mlp.up.kernel', (None, 'tensor'))`, or with a `PartitionSpec`,
        `('mlp.up.kernel', P(None, 'tensor'))`; missing axes are None.
      logical_axes: mesh axis by logical axis; mesh axes themselves need no entry. Here and in
        rules, `expert` and `context` may be missing in the mesh.
      fsdp_min_size: minimum number of elements for sharding a parameter over `fsdp` without a rule.
      strict: whether a rule that matches nothing is an error instead of a warning.
      axes: the axes over which parameters may be sharded; None for all.
      tables_along_one_axis: whether sharding a lookup table along two axes is an error.
      kind: what is placed, for messages.

    Raises:
      ConfigError: rules that are not such pairs, or with an axis that is not in the mesh or in
        `axes`.

    >>> import jax, numpy as np
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    >>> placed = Placement(mesh, [("up", (None, "tensor"))]).place(
    ...     {"up": {"kernel": np.zeros((4, 8))}}
    ... )
    >>> tuple(placed["up.kernel"].spec), placed["up.kernel"].reason
    ((None, 'tensor'), 'up')
    """

    def __init__(
        self,
        mesh: Mesh,
        rules: Rules = (),
        logical_axes: Mapping[str, Axis] | None = None,
        fsdp_min_size: int = 2**18,
        strict: bool = False,
        axes: Sequence[str] | None = None,
        tables_along_one_axis: bool = False,
        kind: str = "parameter",
    ) -> None:
        self.mesh = mesh
        self._axes = tuple(mesh.axis_names if axes is None else axes)
        self._tables_along_one_axis = tables_along_one_axis
        self._kind = kind
        with config_path("rules"):
            self._rules = [self._build_rule(rule) for rule in rules]
        # Not in the order given: a rule for `mlp.up` in a base config must not lose to a later
        # `mlp`. the longest key is the most specific
        self._rules.sort(key=lambda rule: (-len(rule[0]), rule[0]))
        self._logical = dict(logical_axes or {})
        with config_path("logical_axes"):
            for axis in self._logical.values():
                self._check_axis(axis)
        self._fsdp_min_size = fsdp_min_size
        self._strict = strict

    def place(
        self,
        params: Params,
        logical_axes: Mapping[str, Sequence[Axis]] | None = None,
        must_match: bool = True,
    ) -> dict[str, Placed]:
        """Return the sharding for every parameter by dotted path.

        Args:
          params: pytree of arrays or ShapeDtypeStructs.
          logical_axes: for each axis a name, several names, or None, by dotted path; set by the
            model.
          must_match: whether a rule that matches nothing is reported.

        Raises:
          ConfigError: with `strict`, a rule matches nothing; or a table is sharded along two axes.
        """
        leaves = paths.flatten(params)
        axes = logical_axes or {}
        placed = {
            path: self._place_one(path, leaf.shape, axes.get(path)) for path, leaf in leaves.items()
        }
        for key, _ in self._rules if must_match else ():
            # A rule that another one shadows did match; only one without any parameter is a typo.
            if not any(_matches(key, path) for path in leaves):
                message = (
                    f"rules: {key!r} matches no {self._kind}{paths.closest_paths(key, leaves)}"
                )
                if self._strict:
                    raise ConfigError(message)
                logger.warning(message)
        return placed

    def _place_one(self, path: str, shape: tuple[int, ...], names: Sequence[Axis] | None) -> Placed:
        for key, rule_axes in self._rules:
            if _matches(key, path):
                return Placed(self._spec(path, rule_axes, f"the rule {key!r}"), key)
        if names is not None:
            axes = tuple(self._logical_axis(name) for name in names)
            spec = self._spec(path, axes, f"its logical axes {tuple(names)}")
            return Placed(spec, "logical axes")
        spec = self.spec_by_size(shape)
        return Placed(spec, "fsdp" if spec else "")

    def spec_by_size(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the sharding of an array without a rule.

        If it is large, it is `fsdp` along the largest divisible axis.
        """
        count = self.mesh.shape.get("fsdp", 1)
        # JAX rejects a sharding that does not divide the array's axis evenly.
        divisible = [axis for axis, size in enumerate(shape) if size % count == 0]
        # A small parameter saves little memory, and gathering it costs an exchange in each step.
        if count == 1 or math.prod(shape) < self._fsdp_min_size or not divisible:
            return PartitionSpec()
        largest = max(divisible, key=lambda axis: shape[axis])
        return PartitionSpec(*(None,) * largest, "fsdp")

    def _logical_axis(self, name: Axis) -> Axis:
        """Return the mesh axis, or axes, for a logical axis; None if there is none."""
        if not isinstance(name, tuple):
            return self._logical.get(name, name if name in self._axes else None) if name else None
        axes = [self._logical_axis(part) for part in name]
        return tuple(name for axis in axes for name in axis_names(axis)) or None

    def _spec(self, path: str, axes: Sequence[Axis], source: str) -> PartitionSpec:
        # sizes that it does not divide, and an axis that it has twice, are errors of JAX
        axes = list(select_axes(axes, self.mesh.axis_names))
        counts = [math.prod(self.mesh.shape[name] for name in axis_names(axis)) for axis in axes]
        if self._tables_along_one_axis and is_table(path) and sum(n > 1 for n in counts) > 1:
            raise ConfigError(
                f"{source} must shard the lookup table {path!r} along one of its axes, got "
                f"{tuple(axes)}: XLA cannot gather another one within a replica on the mesh "
                f"{dict(self.mesh.shape)}; Pjit has no such limit"
            )
        return PartitionSpec(*axes)

    def _build_rule(self, rule: Any) -> tuple[str, tuple[Axis, ...]]:
        key, axes = rule
        if not isinstance(key, str) or isinstance(axes, str):
            raise ConfigError(
                "a rule must be a pair of a part of a name and the axes, one entry for each, "
                f"('kernel', (None, 'tensor')), got {rule!r}"
            )
        for axis in axes:
            self._check_axis(axis)
        return key, tuple(tuple(axis) if isinstance(axis, list) else axis for axis in axes)

    def _check_axis(self, axis: Axis) -> None:
        for name in axis_names(axis):
            # optional ones, so that meshes with and without experts have one set of rules
            if name not in (*self.mesh.axis_names, *OPTIONAL_AXES):
                raise ConfigError(
                    f"an axis must be in the mesh {self.mesh.axis_names}, got {name!r}"
                )
            if name in self.mesh.axis_names and name not in self._axes:
                raise ConfigError(
                    f"parameters must not be sharded over {name!r}, whose parts are replicas"
                )


def select_axes(spec: Iterable[Axis], names: Collection[str]) -> Iterator[Axis]:
    """Yield the entries of a spec with only the mesh axes in `names`."""
    for axis in spec:
        selected = tuple(name for name in axis_names(axis) if name in names)
        yield axis if selected == axis_names(axis) else selected or None


def _matches(key: str, path: str) -> bool:
    return any(key in alias for alias in paths.path_aliases(path))


def is_table(path: str) -> bool:
    """Return whether a parameter is a lookup table: `embedding` or `embeddings`, as in Flax and
    Haiku.
    """
    return path.rpartition(".")[2] in ("embedding", "embeddings")


def axis_names(axis: Axis) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a spec."""
    return (axis,) if isinstance(axis, str) else axis or ()
