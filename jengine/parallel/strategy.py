"""Strategy interface: how a run places arrays and compiles steps.

With the implementation for a single device.
"""

import collections
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from jengine.config.annotations import Index
from jengine.config.registry import STRATEGIES
from jengine.logging.watchdog import Wait
from jengine.model.model import ArrayTree, Batch, Model, ModelState, Params
from jengine.parallel.flat_state import StepProgram
from jengine.parallel.mesh import DataShard, context_mesh
from jengine.parallel.placement import Axis, Rules

PyTree = Any

# of LLVM, on CPU; the results are bitwise the same
_FAST_COMPILATION = {"xla_backend_optimization_level": 1}


class Strategy(Protocol):
    """Interface between the Runner and the devices; the defaults suit a state without replicas.

    Attributes:
      axis_name: the mapped axis of the step, or None.
      axis_names: further mapped axes of the step, of size 1.
      replicas: number of state replicas; None without a replica axis.
      takes_host_batches: whether `put_batch` leaves them as they are.
      hooks: further hooks of the run, which the strategy needs.
      max_in_flight: number of dispatched steps that may be unfinished; at more, the host waits.
      mesh_shape: number of devices along each mesh axis; empty for a single device.
      mesh_description: the mesh for the log; empty for a single device.
      platform: 'cpu', 'gpu' or 'tpu'.
    """

    axis_name: str | None = None
    axis_names: tuple[str, ...] = ()
    replicas: int | None = None
    takes_host_batches: bool = False
    hooks: Sequence[Any] = ()
    max_in_flight: int
    mesh_shape: Mapping[str, int]
    mesh_description: str
    platform: str

    @property
    def batch_multiple(self) -> int:
        """Number that must divide this process's batch."""

    @property
    def data_shard(self) -> DataShard:
        """Rows of each global batch that this process supplies."""

    def put_batch(self, batch: Batch, chunked: bool = False, rules: Rules | None = None) -> PyTree:
        """Start the transfer of a host batch to the devices.

        Args:
          batch: this process's share, real[B, ...]; see `DataShard`.
          chunked: whether `batch` is the stacked batches of a chunk, real[K, B, ...].
          rules: the `batch_rules` of the loader for batches that have no axis of examples
            (`batch_axis=None`), which each process has as a whole; None for those with such an
            axis.

        Raises:
          ValueError: a batch that cannot be divided.
        """

    def put_replicated(self, tree: ArrayTree) -> PyTree:
        """Copy small values, which are equal on all processes, to every device."""

    def with_explicit_mesh(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, which calls a model outside a step, with the mesh as context if it has
        explicit axes.
        """
        return call

    def compile_init(
        self, make: Callable[..., PyTree], *args: Any, model: Model | None = None
    ) -> Any:
        """Compile `make`, called once with `args`, which returns the training state or hook states.

        `model` may have logical axes for the parameters.
        """

    def compile_train_step(
        self, step: Callable[..., Any], chunked: bool = False, rules: Rules | None = None
    ) -> Callable[..., Any]:
        """Compile `step(state, batch, inputs) -> (state, metrics)`; the state is donated.

        Returns a `StepProgram`, or any function of these arguments, such as what `jax.jit` returns.

        Args:
          step: a training step, or a chunk of them.
          chunked: whether batches have a leading axis [K].
          rules: see `put_batch`.
        """

    def constrain(self, tree: ArrayTree, under: str = "") -> PyTree:
        """Set the shardings for a part of the training state within a compiled step, where XLA
        would choose them.

        Args:
          tree: a training state, gradients, or another part.
          under: the dotted path to that part, followed by a dot: 'params.' for gradients.
        """
        return tree

    def constant_shardings(
        self, params: ArrayTree, logical_axes: Mapping[str, Sequence[Axis]]
    ) -> PyTree:
        """Return the shardings for the parameters of another model, which the step only reads."""

    def gather_tables(self, params: Params) -> PyTree:
        """Return the parameters for use in a model, with lookup tables replicated where XLA
        requires this.
        """
        return params

    def compile_eval_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compile `step(params, model_state, metrics, batch) -> (metrics, predictions)`.

        The metrics are donated.
        """

    def adapt_for_eval(self, model: Model, rules: Rules | None = None) -> Any:
        """Return the model for use in an evaluation step; `rules` as for `put_batch`."""
        return model

    def mean_over_replicas(self, model_state: ModelState) -> PyTree:
        """Return the model state with the mean over replicas in each floating leaf."""
        return model_state


@STRATEGIES.register_module()
class SingleDevice(Strategy):
    """Strategy that places everything on one device; see `Strategy` for the attributes.

    Args:
      device: index into `jax.local_devices()`.
      axis_names: names of mapped axes that the model expects, see `bind_axis_names`.

    >>> strategy = SingleDevice()
    >>> strategy.compile_train_step(lambda state, batch, inputs: (state + batch, {}))(
    ...     jax.numpy.float32(1), 2.0, {}
    ... )
    (Array(3., dtype=float32), {})
    """

    batch_multiple = 1
    data_shard = DataShard()
    mesh_shape: Mapping[str, int] = types.MappingProxyType({})
    mesh_description = ""

    def __init__(self, device: Index = 0, axis_names: Sequence[str] = ()) -> None:
        devices = jax.local_devices()
        if not 0 <= device < len(devices):
            raise ValueError(
                f"SingleDevice: device must be an index of the {len(devices)} local devices, got "
                f"{device}"
            )
        self.device = devices[device]
        self.axis_names = tuple(axis_names)
        self.platform = self.device.platform
        # On CPU a compiled step reads host arrays directly, without the cost of `device_put`
        self.takes_host_batches = self.platform == "cpu"
        # on an accelerator each holds a batch in device memory
        self.max_in_flight = 8 if self.platform == "cpu" else 2

    def put_batch(self, batch: Batch, chunked: bool = False, rules: Rules | None = None) -> PyTree:
        """Start the transfer of a host batch to the device; see `Strategy`."""
        return batch if self.takes_host_batches else jax.device_put(batch, self.device)

    def constant_shardings(
        self, params: ArrayTree, logical_axes: Mapping[str, Sequence[Axis]]
    ) -> PyTree:
        """Return the device for each parameter of another model."""
        return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(self.device), params)

    def put_replicated(self, tree: ArrayTree) -> PyTree:
        """Copy values to the device."""
        return jax.device_put(tree, self.device)

    def compile_init(
        self, make: Callable[..., PyTree], *args: Any, model: Model | None = None
    ) -> Any:
        """Compile a function that is called once with `args`; `model` is not used."""
        return jit_init(make, self.platform, jax.sharding.SingleDeviceSharding(self.device))

    def compile_train_step(
        self, step: Callable[..., Any], chunked: bool = False, rules: Rules | None = None
    ) -> Callable[..., Any]:
        """Compile a training step or a chunk; the state is donated."""
        return StepProgram(bind_axis_names(step, self.axis_names))

    def compile_eval_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compile an evaluation step; the metrics, the third argument, are donated."""
        # Donated, so that a state such as a confusion matrix is updated in place.
        return jax.jit(bind_axis_names(step, self.axis_names), donate_argnums=2)


def default_strategy() -> Strategy:
    """Return the default strategy.

    It is Pjit over the mesh set with `jax.set_mesh`, if there is one. Else it uses all devices
    along the axis `data`, but on CPU, in a single process, only the first device: several CPU
    devices would share the cores that one uses.
    """
    # With several processes a mesh is necessary even on CPU: each of them has only some of the
    # rows.
    several = len(jax.devices()) > 1 and jax.devices()[0].platform != "cpu"
    if several or jax.process_count() > 1 or not context_mesh().empty:
        pjit: Strategy = STRATEGIES.build("Pjit")  # imported here
        return pjit
    return SingleDevice()


def bind_axis_names(step: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return `step` within mapped axes of these names and of size 1.

    Code for `jax.pmap` names the axis of its devices: `nn.BatchNorm(axis_name='batch')`. Where one
    program computes on the whole batch, a mean over the devices is the value itself.

    >>> bind_axis_names(lambda x: jax.lax.pmean(x, "batch"), ["batch"])(jax.numpy.float32(3)).item()
    3.0
    """
    for name in names:
        step = _bind_axis_name(step, name)
    return step


def _bind_axis_name(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(step)
    def run(*args: Any) -> Any:
        # the output has the axis, since what depends on `jax.lax.axis_index` does A vmap binds the
        # name for `jax.lax.pmean` without a device axis, and XLA removes the axis of size 1.
        outputs = jax.vmap(step, in_axes=None, axis_size=1, axis_name=name)(*args)
        return jax.tree.map(lambda x: x[0], outputs)

    return run


def jit_init(make: Callable[..., Any], platform: str, out_shardings: Any) -> Callable[..., Any]:
    """Return `jax.jit(make)` for a function that is called once, so compilation dominates the time.

    On CPU it is compiled with fewer optimizations, which is several times faster.
    """
    options = _FAST_COMPILATION if platform == "cpu" else None
    return jax.jit(make, out_shardings=out_shardings, compiler_options=options)


class DispatchLimiter:
    """Limit for dispatched steps that are unfinished.

    Without a limit the queue, and the memory that it holds, would grow while the device is slower
    than the host. At the limit the host waits until half of the steps are finished, so there are
    fewer wake-ups, each of which takes a core from the running step on CPU. Waiting for a step
    transfers no data.

    Args:
      limit: number of steps.

    Attributes:
      blocks: whether the training loop waits for each step right after its dispatch.
    """

    def __init__(self, limit: int) -> None:
        self.blocks = False
        # Outputs, not states: the next step donates the state, and a donated array cannot be waited
        # for.
        self.tokens: collections.deque[jax.Array] = collections.deque()
        self.limit = limit
        self._waiting = Wait("the device")

    def wait(self) -> None:
        """Call before a dispatch: block while `limit` steps are unfinished."""
        tokens = self.tokens
        if len(tokens) < self.limit:
            return
        while len(tokens) > self.limit // 2:
            token = tokens.popleft()  # steps finish in order
        # The last one taken is enough: a device runs its steps in the order of their dispatch.
        with self._waiting:
            token.block_until_ready()

    def add(self, token: jax.Array) -> None:
        """Call after a dispatch, with an output of the step that is not donated."""
        self.tokens.append(token)

    def drain(self) -> None:
        """Block until every dispatched step is finished."""
        while self.tokens:
            self.tokens.popleft().block_until_ready()
