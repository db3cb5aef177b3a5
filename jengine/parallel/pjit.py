"""Strategy for one program over a device mesh, with sharded batches and sharded or replicated
parameters.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding

from jengine.config import paths
from jengine.config.annotations import Count, Index
from jengine.config.errors import ConfigError
from jengine.config.registry import STRATEGIES
from jengine.model.constrain import set_sharding
from jengine.model.model import ArrayTree
from jengine.parallel.flat_state import StepProgram
from jengine.parallel.mesh import MeshSizes, build_mesh
from jengine.parallel.mesh_strategy import MeshStrategy
from jengine.parallel.placement import Axis, Placement, Rules
from jengine.parallel.strategy import bind_axis_names

PyTree = Any
HOST_MEMORY = "pinned_host"


@STRATEGIES.register_module()
class Pjit(MeshStrategy):
    """Strategy that compiles the step with `jax.jit` (which replaced pjit) over a mesh.

    The step computes the same as on one device: losses, norms and statistics are computed over the
    whole batch. Optimizer state, averages and accumulated gradients are sharded like the
    parameters, so gradients are also exchanged in iterations that only accumulate; `DataParallel`,
    with the same mesh and rules, exchanges them once per update.

    Args:
      mesh: number of devices along `data`, `fsdp` and `tensor`; -1 for the remaining ones; see
        `build_mesh`. Or a `jax.sharding.Mesh`, with explicit or automatic axes. By default the mesh
        set with `jax.set_mesh`, or all devices along `data`.
      rules, logical_axes, fsdp_min_size, strict: how parameters are sharded; see `Placement`.
      devices: number of devices to use; None for all.
      batch_axes: the mesh axes, of any names, over which the batch is sharded, by default `data`
        and `fsdp`.
      axis_names: names of mapped axes that the model expects, see `bind_axis_names`.
      offload: 'optimizer' keeps the optimizer state, with accumulated gradients, in the hosts'
        memory: less memory of the devices, and copies in each step, or once for each chunk.

    Raises:
      ConfigError: a name in `axis_names` that is an axis of the mesh; see `build_mesh`,
        `choose_batch_axes` and `Placement`. ValueError: devices without such memory.

    >>> Pjit(devices=1).mesh_shape
    {'data': 1, 'fsdp': 1, 'tensor': 1}
    """

    def __init__(
        self,
        mesh: Mesh | MeshSizes | None = None,
        rules: Rules = (),
        logical_axes: Mapping[str, Axis] | None = None,
        fsdp_min_size: Index = 2**18,
        strict: bool = False,
        devices: Count | None = None,
        batch_axes: Sequence[str] | None = None,
        axis_names: Sequence[str] = (),
        offload: Literal["optimizer"] | None = None,
    ) -> None:
        built = build_mesh(mesh, devices, batch_axes)
        # For collectives in the model (`axis_name` of BatchNorm); in one program over all devices
        # they have the size 1.
        for name in axis_names:
            if name in built.axis_names:
                raise ConfigError(
                    f"Pjit: axis_names must not be axes of the mesh {built.axis_names}, got "
                    f"{name!r}"
                )
        self.axis_names = tuple(axis_names)
        self.offload = offload
        if offload:
            # In the constructor: a platform without pinned host memory would fail in the compiler,
            # minutes later.
            built.devices.flat[0].memory(HOST_MEMORY)
        super().__init__(Placement(built, rules, logical_axes, fsdp_min_size, strict), batch_axes)

    def shardings(self, tree: ArrayTree, under: str = "") -> PyTree:
        """Return the sharding for every leaf, with the memory that it is in; see `MeshStrategy`."""
        shardings = super().shardings(tree, under)
        return _offload_optimizer_state(tree, shardings, under) if self.offload else shardings

    def compile_train_step(
        self, step: Callable[..., Any], chunked: bool = False, rules: Rules | None = None
    ) -> Callable[..., Any]:
        """Compile a training step or a chunk; the state is donated and keeps the same shardings."""
        # Set, or XLA might choose other shardings for the new state, and the next call would
        # compile again.
        shardings = None if self._state is None else (self._state, self.sharding())
        if self.offload:
            step = _compute_on_device(step)
        return StepProgram(self._with_mesh(bind_axis_names(step, self.axis_names)), out=shardings)

    def constrain(self, tree: ArrayTree, under: str = "") -> PyTree:
        """Set the shardings within a compiled step; see `Strategy`."""
        return jax.tree.map(
            lambda leaf, sharding: set_sharding(leaf, self.mesh, sharding.spec),
            tree,
            self.shardings(tree, under),
        )


# --- Optimizer state in the memory of the host ---


def _offload_optimizer_state(tree: ArrayTree, shardings: PyTree, under: str = "") -> PyTree:
    """Return the shardings for a training state, or a part of it, with the arrays of the optimizer
    on the host.

    Scalars, such as the number of updates, stay on the device.
    """

    def move(path: str, leaf: Any, sharding: NamedSharding) -> NamedSharding:
        is_moved = f"{under}{path}".startswith("opt_state.") and leaf.ndim > 0
        return sharding.with_memory_kind(HOST_MEMORY) if is_moved else sharding

    return paths.map_with_path(move, tree, shardings)


def _compute_on_device(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training step that copies the optimizer state to the device.

    Its output shardings copy it back.
    """

    @functools.wraps(step)
    def run(state: Any, *inputs: Any) -> Any:
        copied = jax.device_put(state.opt_state, jax.memory.Space.Device)
        new_state, outputs = step(state.replace(opt_state=copied), *inputs)
        # What only passes through, such as moments while gradients are accumulated, is not copied
        # at all.
        opt_state = jax.tree.map(
            lambda old, copy, new: old if new is copy else new,
            state.opt_state,
            copied,
            new_state.opt_state,
        )
        return new_state.replace(opt_state=opt_state), outputs

    return run
