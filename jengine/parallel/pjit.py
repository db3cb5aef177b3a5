"""One program over a mesh of devices: the batch divided, parameters divided or copied, collectives placed by XLA."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jengine import paths
from jengine.logging import format_table
from jengine.parallel.mesh import build_mesh
from jengine.parallel.on_mesh import OnMesh
from jengine.parallel.placement import COLUMNS, Axis, Placement, placement_table
from jengine.parallel.strategy import SingleDevice
from jengine.registry import STRATEGIES

PyTree = Any
logger = logging.getLogger("jengine")


@STRATEGIES.register_module()
class Pjit(OnMesh):
    """The step as `jax.jit` over a mesh (what pjit is today): the program of one device, on many.

    Whatever the step computes is what one device would: losses, norms and statistics are those of the whole batch. The
    optimizer's state, averages and accumulated gradients lie as their parameters do.

    Args:
      mesh: devices along `data`, `fsdp` and `tensor`; -1 takes what is left. Or a `jax.sharding.Mesh`.
      rules: `(part of a name, axes)` pairs, see `Placement`.
      logical_axes: logical axis of a Flax model -> axis of the mesh.
      fsdp_min_size: elements from which on a parameter is divided over `fsdp` by itself.
      strict: a rule that matches nothing is an error, not a warning.
      devices: how many devices to take; None takes all.

    Raises:
      ConfigError: see `build_mesh` and `Placement`.
    """

    def __init__(
        self,
        mesh: Mesh | Mapping[str, int] | None = None,
        rules: Sequence[tuple[str, Sequence[Axis]]] = (),
        logical_axes: Mapping[str, Axis] | None = None,
        fsdp_min_size: int = 2**18,
        strict: bool = False,
        devices: int | None = None,
    ) -> None:
        super().__init__(build_mesh(mesh, devices))
        self._placement = Placement(self.mesh, rules, logical_axes, fsdp_min_size, strict)
        self._specs: dict[str, tuple[tuple[int, ...], PartitionSpec]] = {}
        self._state: PyTree = None

    def init_state(self, make: Callable[..., PyTree], *args: Any, model: Any = None) -> PyTree:
        """Runs `make(*args)`, compiled so that each device makes its own part and none ever holds the whole.

        Args:
          make: gives a TrainState, or states that belong to the parameters of the one made before.
          *args: arrays for it.
          model: whose `logical_axes` count.

        Raises:
          ValueError: an example batch among `args` that does not divide. ConfigError: see `Placement.place`.
        """
        for arg in args:
            if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(arg)):  # the example batch
                self.check_batch(arg)
        shapes = jax.eval_shape(make, *args)
        if hasattr(shapes, "params"):
            self._place(shapes.params, getattr(model, "logical_axes", None))
        shardings = self.shardings(shapes)
        if hasattr(shapes, "params"):
            self._state = shardings
        return jax.jit(make, out_shardings=shardings)(*args)

    def shardings(self, tree: PyTree) -> PyTree:
        """The sharding of every leaf of a state: that of the parameter whose path its own ends with, else a copy."""
        return paths.map_with_path(lambda path, leaf: self.sharding(*self._spec(path, leaf.shape)), tree)

    def compile_train_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a training step; the state, its first argument, is donated, and stays where it was made."""
        shardings = None if self._state is None else (self._state, self.sharding())
        return jax.jit(step, donate_argnums=0, out_shardings=shardings)

    def adapt_for_eval(self, model: Any) -> Any:
        """The model as an evaluation step takes it: itself."""
        return model

    def mean_over_replicas(self, model_state: PyTree) -> PyTree:
        """The model state as it is: its statistics are those of the whole batch."""
        return model_state

    def _place(self, params: PyTree, logical_axes: Mapping[str, Sequence[Axis]] | None) -> None:
        placed = self._placement.place(params, logical_axes)
        shapes = paths.flatten(params)
        self._specs = {path: (tuple(shapes[path].shape), spec) for path, (spec, _) in placed.items()}
        title = f"Placement on the mesh {dict(self.mesh.shape)}"
        logger.info("%s", "\n" + format_table(COLUMNS, placement_table(placed, params, self.mesh), title=title))

    def _spec(self, path: str, shape: tuple[int, ...]) -> PartitionSpec:
        parts = path.split(".")
        for start in range(len(parts)):
            found = self._specs.get(".".join(parts[start:]))
            if found is not None and found[0] == tuple(shape):
                return found[1]
        return PartitionSpec()


def default_strategy() -> Any:
    """The strategy of a run that names none.

    All devices as `data` of one mesh. On CPU the first device alone, unless there are several processes: what XLA calls
    several CPU devices shares the cores that one device uses.
    """
    several = len(jax.devices()) > 1 and jax.devices()[0].platform != "cpu"
    return Pjit() if several or jax.process_count() > 1 else SingleDevice()
