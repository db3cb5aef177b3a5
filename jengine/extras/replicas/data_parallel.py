"""Strategy that runs the step on each replica with separate examples, and averages the gradients.

This is how PyTorch's DistributedDataParallel behaves: each replica has separate statistics, for
instance in BatchNorm, and replicas exchange only gradients, once per update, losses, for the log,
and what a loss passes to `gather_replicas`. Parameters and optimizer state are the same on all
replicas. Other state has a leading axis with one entry per replica: the model state, the
accumulated gradients, and what hooks store under `model_state`.

A replica is one device, or several over which XLA shards parameters and examples, as it does for
`Pjit`.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from jengine.config import paths
from jengine.config.annotations import Count, Index
from jengine.config.errors import ConfigError
from jengine.config.registry import STRATEGIES
from jengine.model.constrain import axes_of_type, set_sharding
from jengine.model.model import (
    ArrayTree,
    Batch,
    Model,
    ModelState,
    Params,
    Scalars,
    predict_with_key,
)
from jengine.parallel.flat_state import StepProgram
from jengine.parallel.mesh import MeshSizes, build_mesh, choose_batch_axes
from jengine.parallel.mesh_strategy import MeshStrategy
from jengine.parallel.placement import Axis, Placement, Rules, axis_names, is_table, select_axes
from jengine.parallel.replica_axis import AXIS, is_per_replica, replicas_along

PyTree = Any


@STRATEGIES.register_module(name="Replica")  # its former name, in existing configs
@STRATEGIES.register_module()
class DataParallel(MeshStrategy):
    """Strategy that runs the step on every replica separately.

    The mapped axis is `data`, or the first in `batch_axes`. In iterations that only accumulate,
    replicas exchange only their losses, for the log.

    Args:
      impl: 'shard_map', or 'pmap', the name in old code for the same.
      mesh: `data` sets the number of replicas, each over the devices along `fsdp` and `tensor`; see
        `build_mesh`. Or a `jax.sharding.Mesh`, as for `Pjit`.
      rules, logical_axes, fsdp_min_size, strict: how parameters are sharded within a replica; see
        `Placement`. No logical axis may be sharded over `data`.
      devices: number of devices to use; None for all.
      batch_axes: axes over which the batch is sharded, by default `data` and `fsdp`; the replicas
        are along the first.
      axis_names: one name for the mapped axis instead, which the model expects: with `('batch',)`,
        `nn.BatchNorm(axis_name='batch')` has the statistics of all replicas, as in a pmap.

    Raises:
      ConfigError: several `axis_names`, an unknown `impl`, or a mesh that it does not support; see
        `build_mesh` and `Placement`.
    """

    def __init__(
        self,
        impl: Literal["shard_map", "pmap"] = "shard_map",
        mesh: Mesh | MeshSizes | None = None,
        rules: Rules = (),
        logical_axes: Mapping[str, Axis] | None = None,
        fsdp_min_size: Index = 2**18,
        strict: bool = False,
        devices: Count | None = None,
        batch_axes: Sequence[str] | None = None,
        axis_names: Sequence[str] = (),
    ) -> None:
        built = build_mesh(mesh, devices, batch_axes)
        if axis_names and (AXIS in built.axis_names or batch_axes):
            built, batch_axes = _rename_replicas(built, batch_axes, axis_names)
        sizes = dict(built.shape)
        if batch_axes is None and AXIS not in sizes:
            raise ConfigError(
                "DataParallel: the mesh must have the axis 'data', or `batch_axes` must name that "
                f"of the replicas first, got the axes {tuple(sizes)}"
            )
        self.axis_name = self._axis = axis = choose_batch_axes(built.axis_names, batch_axes)[0]
        # XLA cannot partition a program whose mapped axes all have the size 1
        if sizes[axis] == 1 < built.size:
            raise ConfigError(
                f"DataParallel: the mesh must have several replicas along {axis!r}, got {sizes}; "
                "for one replica over several devices use Pjit, which computes the same"
            )
        inner_axes = [name for name in built.axis_names if name != axis]
        # XLA partitions the program along the other axes, except those of size 1.
        self._mapped = {name for name, size in built.shape.items() if name == axis or size == 1}
        if explicit := sorted(axes_of_type(built, AxisType.Explicit) - self._mapped):
            raise ConfigError(
                "DataParallel: the axes over which a replica is sharded must be of AxisType.Auto, "
                f"got explicit {', '.join(explicit)}: within a mapped program, JAX cannot leave "
                "explicit axes (`auto_axes`), as `nnx.Embed` does; use Pjit, or Auto axes"
            )
        # see `gather_tables`
        self._gathers_tables = sum(built.shape[name] > 1 for name in inner_axes) > 1
        placement = Placement(
            built,
            rules,
            logical_axes,
            fsdp_min_size,
            strict,
            inner_axes,
            tables_along_one_axis=self._gathers_tables,
        )
        super().__init__(placement, batch_axes)
        self.replicas = sizes[axis]
        self._per_replica = PartitionSpec(axis)

    def compile_train_step(
        self, step: Callable[..., Any], chunked: bool = False, rules: Rules | None = None
    ) -> Callable[..., Any]:
        """Compile a training step or a chunk; the state, the first argument, is donated.

        Raises:
          ConfigError: batches without an axis of examples, of which no rule gives each replica a
            part of its own.
        """
        axes = [name for _, entry in rules or () for axis in entry for name in axis_names(axis)]
        if rules is not None and self._axis not in axes:
            raise ConfigError(
                "DataParallel: with batch_axis=None a rule in `batch_rules` must shard entries "
                f"over {self._axis!r}: every replica would compute the same from the same "
                "batch; use Pjit"
            )

        def run_replica(state: PyTree, batch: Batch, hyperparams: Scalars) -> Any:
            # `shard_map` keeps the mapped axis with size 1; the step knows nothing of it.
            own = self._map_per_replica(lambda x: x[0], state)
            new_state, metrics = self._run_step(step, own, batch, hyperparams)
            return self._map_per_replica(lambda x: x[None], new_state), metrics

        def run(state: PyTree, batch: Batch, hyperparams: Scalars) -> Any:
            specs = self._replica_specs(state)
            # The stacked batches of a chunk have the axis of examples second.
            batch_specs: Any = PartitionSpec(None, self._axis) if chunked else self._per_replica
            if rules is not None:
                shardings = self.whole_batch_shardings(batch, rules, chunked)
                batch_specs = jax.tree.map(
                    lambda s: PartitionSpec(*select_axes(s.spec, self._mapped)), shardings
                )
            mapped = self._map(
                run_replica, (specs, batch_specs, PartitionSpec()), (specs, PartitionSpec())
            )
            return mapped(state, batch, hyperparams)

        if self._state is None:
            return StepProgram(run)
        # Both shardings are set, or a state from a dump would be donated to a buffer with another
        # size.
        return StepProgram(run, in_state=self._state, out=(self._state, self.sharding()))

    def constrain(self, tree: ArrayTree, under: str = "") -> PyTree:
        """Set the shardings within a replica; see `Strategy`."""
        inner = set(self.mesh.axis_names) - self._mapped
        if not inner:
            return tree
        mesh = jax.sharding.get_abstract_mesh()  # in a mapped function, other than `self.mesh`

        def constrain_leaf(path: str, leaf: jax.Array) -> jax.Array:
            spec = super(DataParallel, self)._spec(under + path, leaf.shape)
            # mapped axes have the size 1
            return set_sharding(leaf, mesh, PartitionSpec(*select_axes(spec, inner)))

        return paths.map_with_path(constrain_leaf, tree)

    def gather_tables(self, params: Params) -> PyTree:
        """Return the parameters with lookup tables replicated within a replica that has two device
        axes.

        XLA's partitioner may end the process at a lookup in a shard, if the program is mapped over
        `data` and partitioned over two axes, depending on the sizes.
        """
        if not self._gathers_tables:
            return params
        mesh = jax.sharding.get_abstract_mesh()
        return paths.map_with_path(
            lambda path, leaf: (
                set_sharding(leaf, mesh, PartitionSpec()) if is_table(path) else leaf
            ),
            params,
        )

    def constant_shardings(
        self, params: ArrayTree, logical_axes: Mapping[str, Sequence[Axis]]
    ) -> PyTree:
        """Return the shardings for the parameters of another model, with lookup tables replicated
        where `gather_tables` gathers them.
        """
        shardings = super().constant_shardings(params, logical_axes)
        if not self._gathers_tables:
            return shardings
        return paths.map_with_path(
            lambda path, sharding: self.sharding() if is_table(path) else sharding, shardings
        )

    def adapt_for_eval(self, model: Model, rules: Rules | None = None) -> Any:
        """Return a model that predicts on each replica with the replica's model state."""
        if rules is not None:
            raise ConfigError(
                "DataParallel: `batch_axis` must be 0 in evaluations and predictions, which each "
                "replica computes for examples of its own, got None; use Pjit"
            )

        def predict_replica(
            params: Params, state: PyTree, batch: Batch, rng: jax.Array | None
        ) -> PyTree:
            model_state = self._map_per_replica(lambda x: x[0], state)["model_state"]
            if rng is not None and (self.replicas or 1) > 1:  # replicas must not sample the same
                rng = jax.random.fold_in(rng, jax.lax.axis_index(self._axis))
            return predict_with_key(model, self.gather_tables(params), model_state, batch, rng)

        def predict(
            params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
        ) -> PyTree:
            state = {"model_state": model_state}
            specs = PartitionSpec(), self._replica_specs(state), self._per_replica, PartitionSpec()
            return self._map(predict_replica, specs, self._per_replica)(params, state, batch, rng)

        return types.SimpleNamespace(predict=predict, predicts_with_rng=model.predicts_with_rng)

    def mean_over_replicas(self, model_state: ModelState) -> PyTree:
        """Return the model state with the mean over replicas in each floating leaf."""
        # An empty state would compile a program that does nothing.
        if self.replicas == 1 or not jax.tree.leaves(model_state):
            return model_state
        state = {"model_state": model_state}
        # The same sharding as before: the result must be accepted by the compiled step without
        # another program.
        average = jax.jit(
            functools.partial(self._map_per_replica, _average_replicas),
            out_shardings=self.shardings(state),
        )
        averaged: PyTree = average(state)["model_state"]
        return averaged

    def _map(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Return the function for one replica as a function for all."""
        # The check of varying axes would reject loops in a model whose carry starts as a constant.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self._mapped,
            check_vma=False,
        )

    def _add_replica_axis(self, state: ArrayTree) -> PyTree:
        """Give all replicas the same initial state."""
        return self._map_per_replica(self._copy_to_replicas, state)

    def _copy_to_replicas(self, leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (self.replicas, *leaf.shape))

    def _spec(self, path: str, shape: tuple[int, ...]) -> PartitionSpec:
        if self._is_per_replica(path):
            return PartitionSpec(self._axis, *super()._spec(path, shape[1:]))
        return super()._spec(path, shape)

    def _replica_specs(self, state: ArrayTree) -> PyTree:
        """Return how `shard_map` divides each leaf: along the replica axis, or not at all."""
        return paths.map_with_path(
            lambda path, _: self._per_replica if self._is_per_replica(path) else PartitionSpec(),
            state,
        )

    def _is_per_replica(self, path: str) -> bool:
        """Return whether the training state's leaf at this path has the replica axis."""
        return is_per_replica(path)

    def _map_per_replica(self, fn: Callable[[Any], Any], state: ArrayTree) -> PyTree:
        return paths.map_with_path(
            lambda path, leaf: fn(leaf) if self._is_per_replica(path) else leaf, state
        )

    def _run_step(
        self, step: Callable[..., Any], state: PyTree, batch: Batch, hyperparams: Scalars
    ) -> Any:
        """Run the step on one replica, within the mapped program."""
        with replicas_along(self._axis):
            return step(state, batch, hyperparams)


Replica = DataParallel


def _average_replicas(leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf  # a mean of counters would not be one
    return jnp.broadcast_to(leaf.mean(axis=0, keepdims=True), leaf.shape)


def _rename_replicas(
    mesh: Mesh, batch_axes: Sequence[str] | None, names: Sequence[str]
) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh and the batch axes with another name for the axis of the replicas."""
    old, *others = choose_batch_axes(mesh.axis_names, batch_axes)
    if len(names) != 1 or names[0] in set(mesh.axis_names) - {old}:
        raise ConfigError(
            "DataParallel: axis_names must be one name, which is not that of another axis of the "
            f"mesh {mesh.axis_names}, got {tuple(names)}: the replicas are along one axis"
        )
    # The devices stay where they are: only the name by which the model calls the axis changes.
    renamed = tuple(names[0] if name == old else name for name in mesh.axis_names)
    return Mesh(mesh.devices, renamed, axis_types=mesh.axis_types), (names[0], *others)
