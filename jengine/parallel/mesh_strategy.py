"""Base class for strategies with a mesh: shardings for the state and for batches, and
evaluation.
"""

import functools
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jengine.config import paths
from jengine.config.errors import config_path
from jengine.model.constrain import axes_of_type
from jengine.model.model import ArrayTree, Batch, Model, get_model
from jengine.parallel.mesh import (
    DataShard,
    choose_batch_axes,
    context_mesh,
    find_data_shard,
)
from jengine.parallel.placement import Axis, Placement, Rules
from jengine.parallel.processes import put_whole
from jengine.parallel.strategy import Strategy, bind_axis_names, jit_init

PyTree = Any
logger = logging.getLogger("jengine")


class MeshStrategy(Strategy):
    """Strategy for several devices; see `Strategy` for the other attributes.

    Args:
      placement: determines how parameters are sharded over the mesh.
      batch_axes: the mesh axes over which the batch is sharded; None for `data` and `fsdp`.

    Attributes:
      mesh: the `jax.sharding.Mesh`.
      batch_axes: the axes over which the batch is sharded.
    """

    def __init__(self, placement: Placement, batch_axes: Sequence[str] | None = None) -> None:
        self.mesh: Mesh = placement.mesh
        self.mesh_shape = dict(self.mesh.shape)
        self.platform = self.mesh.devices.flat[0].platform
        self.batch_axes = choose_batch_axes(self.mesh.axis_names, batch_axes)
        explicit = ", ".join(sorted(axes_of_type(self.mesh, AxisType.Explicit)))
        types = f" with explicit {explicit}" if explicit else ""
        source = " of jax.set_mesh" if self.mesh == context_mesh() else ""
        self.mesh_description = f"{self.mesh_shape}{types}{source}"
        self._placement = placement
        self._specs: dict[str, tuple[tuple[int, ...], PartitionSpec]] = {}
        self._whole_shardings: dict[Any, PyTree] = {}  # by form of the batch and rules
        self._state: PyTree = None  # shardings of the training state, once it has been created
        # CPU devices hang with more
        self.max_in_flight = 1 if self.platform == "cpu" and self.mesh.size > 1 else 2

    @property
    def batch_multiple(self) -> int:
        """Number of local devices over which this process's batch is divided."""
        return math.prod(self.mesh.shape[name] for name in self.batch_axes) // self.data_shard.count

    @functools.cached_property
    def data_shard(self) -> DataShard:
        """Rows of each global batch that this process supplies."""
        return find_data_shard(self.mesh, jax.process_index(), self.batch_axes)

    def batch_sharding(self, chunked: bool = False) -> NamedSharding:
        """Return the sharding for each array in a batch, or in the stacked batches of a chunk."""
        return self.sharding(None, self.batch_axes) if chunked else self.sharding(self.batch_axes)

    def compile_init(
        self, make: Callable[..., PyTree], *args: Any, model: Model | None = None
    ) -> Any:
        """Compile `make`, see `Strategy`, so that each device creates one shard and none ever holds
        the whole state.

        Raises:
          ConfigError: see `Placement.place`.
        """
        # The shardings depend on the shapes, and are an argument of the jit that creates the
        # arrays.
        shapes = jax.eval_shape(make, *args)
        # Hook states that are created after the training state, whose shardings are known by now.
        if not hasattr(shapes, "params"):
            return jit_init(make, self.platform, self.shardings(shapes, under="hook_state."))
        params = shapes.params
        logical_axes = None
        if model is not None:
            base = get_model(model)
            # LoRA's frozen parameters are in the model state, but the rules are written for the
            # whole network.
            params = base.base_variables(params, shapes.model_state)[0]
            logical_axes = base.logical_axes
        assigned = self._placement.place(params, logical_axes)
        leaves = paths.flatten(params)
        self._specs = {
            path: (tuple(leaves[path].shape), spec) for path, (spec, _) in assigned.items()
        }
        sharded = [
            f"  {path} {self._specs[path][0]}: {tuple(spec)} by {reason}"
            for path, (spec, reason) in assigned.items()
            if reason
        ]
        logger.debug(
            "\n".join([f"Placement on the mesh {self.mesh_description}:", *sharded])
            + f"\n  {len(assigned) - len(sharded)} other parameters are replicated"
        )

        def make_state(*args: Any) -> PyTree:
            return self._add_replica_axis(make(*args))

        # Only now are the specs known by which moments and averages find those of their parameters.
        self._state = self.shardings(jax.eval_shape(make_state, *args))
        return jit_init(make_state, self.platform, self._state)

    def shardings(self, tree: ArrayTree, under: str = "") -> PyTree:
        """Return the sharding for every leaf in a training state, or in a part that is `under` a
        path with a dot.

        A leaf is sharded like the parameter whose path is the end of the leaf's path. What an
        optimizer keeps for a parameter in another shape is sharded by its size; other leaves are
        replicated.
        """
        return paths.map_with_path(
            lambda path, leaf: self.sharding(*self._spec(under + path, leaf.shape)), tree
        )

    def constant_shardings(
        self, params: ArrayTree, logical_axes: Mapping[str, Sequence[Axis]]
    ) -> PyTree:
        """Return the shardings for the parameters of another model, by the rules of this one."""
        placed = self._placement.place(params, logical_axes, must_match=False)
        return paths.map_with_path(lambda path, _: self.sharding(*placed[path].spec), params)

    def put_batch(self, batch: Batch, chunked: bool = False, rules: Rules | None = None) -> PyTree:
        """Start the transfer of a host batch to the devices; see `Strategy`."""
        if rules is not None:
            return self._put_whole(batch, self.whole_batch_shardings(batch, rules, chunked))
        sharding = self.batch_sharding(chunked)
        if jax.process_count() == 1:
            return jax.device_put(batch, sharding)
        # `device_put` would take the rows of this process for the whole batch.
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)

    def whole_batch_shardings(self, batch: Batch, rules: Rules, chunked: bool = False) -> PyTree:
        """Return the shardings by `rules` for a batch without an axis of examples, or for a
        stack of such batches.
        """
        # Rules are lists in a config, which cannot be hashed; their text can.
        form = (
            jax.tree.structure(batch),
            tuple(map(np.shape, jax.tree.leaves(batch))),
            chunked,
            str(rules),
        )
        if form not in self._whole_shardings:
            example = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(np.shape(x)[chunked:], np.float32), batch
            )
            with config_path("batch_rules"):
                # No entry is large enough for `fsdp` by default: only rules shard the entries of a
                # batch.
                placement = Placement(
                    self.mesh,
                    rules,
                    fsdp_min_size=sys.maxsize,
                    strict=True,
                    kind="entry of the batch",
                )
                placed = placement.place(example)
            self._whole_shardings[form] = paths.map_with_path(
                lambda path, _: self.sharding(*[None] * chunked, *placed[path].spec), batch
            )
        return self._whole_shardings[form]

    def put_replicated(self, tree: ArrayTree) -> PyTree:
        """Copy small values, which are equal on all processes, to every device."""
        return self._put_whole(tree, jax.tree.map(lambda _: self.sharding(), tree))

    def _put_whole(self, tree: ArrayTree, shardings: PyTree) -> PyTree:
        """Place arrays that each process has as a whole."""
        if jax.process_count() == 1:
            return jax.device_put(tree, shardings)
        return jax.tree.map(put_whole, tree, shardings)

    def compile_eval_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compile an evaluation step.

        The metrics, the third argument, are donated and replicated.
        """
        bound = self._with_mesh(bind_axis_names(step, self.axis_names))
        # Replicated, as the next step and the host read the sums; XLA chooses how predictions are
        # sharded.
        return jax.jit(bound, donate_argnums=2, out_shardings=(self.sharding(), None))

    def with_explicit_mesh(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with the mesh as context if it has explicit axes, which `out_sharding=` in
        a model requires.

        Otherwise it has no mesh, also within `jax.set_mesh`: Linen would take logical axes for mesh
        axes.
        """
        is_explicit = AxisType.Explicit in self.mesh.axis_types
        return self._with_mesh(
            call, self.mesh.abstract_mesh if is_explicit else AbstractMesh((), ())
        )

    def _with_mesh(
        self, step: Callable[..., Any], mesh: AbstractMesh | None = None
    ) -> Callable[..., Any]:
        """Return a step whose traces have the mesh as context: a model may constrain shardings
        by axis names.
        """
        context = self.mesh.abstract_mesh if mesh is None else mesh

        # The name of the step becomes the name of the program in profiles and dumps.
        @functools.wraps(step)
        def run(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(context):
                return step(*args)

        return run

    def _add_replica_axis(self, state: ArrayTree) -> PyTree:
        """Convert the training state from a single device to this strategy.

        Without replicas it is unchanged.
        """
        return state

    def _spec(self, path: str, shape: tuple[int, ...]) -> PartitionSpec:
        # Moments, averages and frozen parameters have the parameter's path at the end of their own.
        # The shape tells them from factored moments of the same name.
        parts = path.split(".")
        names = [".".join(parts[start:]) for start in range(len(parts))]  # the longest first
        found = [self._specs[name] for name in names if name in self._specs]
        for param_shape, spec in found:
            if param_shape == tuple(shape):
                return spec
        return (
            self._placement.spec_by_size(shape)
            if found and parts[0] == "opt_state"
            else PartitionSpec()
        )

    def sharding(self, *axes: Axis) -> NamedSharding:
        """Return the sharding over these mesh axes, one entry per array axis.

        Without arguments, replicated.
        """
        return NamedSharding(self.mesh, PartitionSpec(*axes))
