"""What all strategies with a mesh share: batches divided over it, and evaluation."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.parallel.mesh import batch_axes, batch_parts, check_batch

PyTree = Any


class OnMesh:
    """A strategy for several devices.

    Attributes:
      mesh: the `jax.sharding.Mesh`.
      axis_name: the mapped axis of the step, None where it has none.
      replicas: into how many replicas the state is divided, None where there are none.
      max_in_flight: training steps that may be dispatched and unfinished; 1 on several CPU devices, where more hang.
    """

    axis_name: str | None = None
    replicas: int | None = None

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self.max_in_flight = 1 if on_cpu and mesh.size > 1 else 2

    def put_batch(self, batch: PyTree) -> PyTree:
        """Starts the copy of a host batch to the devices, each of which gets its rows.

        Raises:
          ValueError: the batch does not divide.
        """
        self.check_batch(batch)
        sharding = self.sharding(batch_axes(self.mesh))
        if jax.process_count() == 1:
            return jax.device_put(batch, sharding)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)

    def check_batch(self, batch: PyTree) -> None:
        """Holds that a host batch, this process's share, divides over its devices.

        Raises:
          ValueError: it does not.
        """
        check_batch(batch, max(batch_parts(self.mesh) // jax.process_count(), 1))

    def compile_eval_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles an evaluation step; the metric sums, its third argument, are donated, and every device has them."""
        everywhere = self.sharding()
        compiled = jax.jit(step, donate_argnums=2, out_shardings=(everywhere, None))

        def evaluate(params: PyTree, model_state: PyTree, metrics: PyTree, batch: PyTree) -> Any:
            return compiled(params, model_state, self._everywhere(metrics), batch)

        return evaluate

    def _everywhere(self, tree: PyTree) -> PyTree:
        """Small values that all processes have, as arrays with a copy on every device."""
        sharding = self.sharding()
        if jax.process_count() == 1:
            return jax.device_put(tree, sharding)

        def place(leaf: jax.Array) -> jax.Array:
            # device_put would compare the values of all processes, by a collective, at every call.
            if leaf.sharding == sharding:
                return leaf
            return jax.make_array_from_callback(leaf.shape, sharding, np.asarray(leaf).__getitem__)

        return jax.tree.map(place, tree)

    def sharding(self, *axes: Any) -> NamedSharding:
        """The sharding whose array axes are divided over these axes of the mesh; without any, a copy everywhere."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))
