"""Where arrays live and how the step is compiled: the seam between the Runner and the devices."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jengine.parallel.once import jit_once
from jengine.parallel.resident import ResidentRows, ResidentStep
from jengine.registry import STRATEGIES

PyTree = Any


@STRATEGIES.register_module()
class SingleDevice:
    """Everything on one device.

    Args:
      device: index among `jax.local_devices()`.

    Attributes:
      max_in_flight: training steps that may be dispatched and unfinished before the host waits.
      axis_name: None: the step has no mapped axis.
      replicas: None: there are none.
    """

    max_in_flight = 2
    axis_name: str | None = None
    replicas: int | None = None

    def __init__(self, device: int = 0) -> None:
        devices = jax.local_devices()
        if not 0 <= device < len(devices):
            raise ValueError(f"SingleDevice: there are {len(devices)} devices, found device={device}")
        self.device = devices[device]

    @property
    def platform(self) -> str:
        """What kind of device it is: 'cpu', 'gpu' or 'tpu'."""
        return self.device.platform

    @property
    def takes_host_batches(self) -> bool:
        """Whether the compiled step takes host arrays as they are, so that `put_batch` has nothing to do.

        It does on a CPU, whose memory is the host's: for a small batch a third of the time of an explicit copy.
        """
        return self.platform == "cpu"

    def put_batch(self, batch: PyTree) -> PyTree:
        """Starts the copy of a host batch to the device, where that is to be done."""
        return batch if self.takes_host_batches else jax.device_put(batch, self.device)

    def compile_init(self, make: Callable[..., PyTree], *args: Any, model: Any = None) -> Any:
        """Compiles `make`, to be called once with `args`; the result stays on the device. `model` does not matter."""
        return jit_once(make, self.platform, jax.sharding.SingleDeviceSharding(self.device))

    def compile_train_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a training step; the state, its first argument, is donated."""
        return jax.jit(step, donate_argnums=0)

    def compile_resident_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """As `compile_train_step`, for a loop: the state may stay in pieces from call to call."""
        return ResidentStep(step)

    def compile_rows(
        self, step: Callable[..., Any], outputs: Mapping[str, jax.ShapeDtypeStruct]
    ) -> ResidentRows | None:
        """Compiles several steps with a call for each, see `ResidentRows`; None where that is of no use.

        It is on a CPU. To an accelerator batches are sent ahead, while it is busy with those before.
        """
        return ResidentRows(step, outputs, self.device) if self.takes_host_batches else None

    def compile_eval_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles an evaluation step; the metric sums, its third argument, are donated."""
        return jax.jit(step, donate_argnums=2)

    def adapt_for_eval(self, model: Any) -> Any:
        """The model as an evaluation step takes it: itself."""
        return model

    def mean_over_replicas(self, model_state: PyTree) -> PyTree:
        """The model state as it is: there is one."""
        return model_state


class InFlight:
    """Keeps the host from running ahead: at most `limit` dispatched steps are unfinished.

    Waiting for a step costs no transfer. Without a bound the queue of dispatched work, and the memory it holds, grows
    for as long as the device is slower than the host. Once the bound is reached the host waits until half of the steps
    are finished, and then dispatches several in a row: on a CPU it takes a core from them each time that it wakes up.

    Attributes:
      limit: may be changed at any time.
    """

    def __init__(self, limit: int) -> None:
        self._tokens: collections.deque[Any] = collections.deque()
        self.limit = limit

    def wait(self) -> None:
        """Call before a dispatch: waits, if `limit` steps are unfinished, until half of them are finished."""
        tokens = self._tokens
        if len(tokens) < self.limit:
            return
        while len(tokens) > self.limit // 2:
            token = tokens.popleft()  # finished before the next one is
        if hasattr(token, "block_until_ready"):  # an array: this runs once an iteration
            token.block_until_ready()
        else:
            jax.block_until_ready(token)

    def drain(self) -> None:
        """Waits until nothing that was dispatched is unfinished."""
        while self._tokens:
            jax.block_until_ready(self._tokens.popleft())

    def add(self, token: Any) -> None:
        """Call after a dispatch, with an output of the step that is not donated."""
        self._tokens.append(token)
