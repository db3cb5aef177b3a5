"""How a training loop goes through its batches: one iteration in each call of the compiled step, or several."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jengine.data import prefetch_to_device
from jengine.data.collate import is_flat
from jengine.errors import ConfigError
from jengine.runner.training_step import PlannedStep

if TYPE_CHECKING:
    from jengine.runner.loops import TrainLoop

PyTree = Any

_TIMED_AFTER, _TIMED = 3, 10  # 'auto': iterations that are not timed (they compile), and those that are
_UNFIT = (
    "steps_per_call: the step has convolutions, which XLA compiles for a CPU to something ten times slower within a "
    "loop; iterations are run one by one."
)
_FILL_SECONDS, _MOST = 0.010, 64  # 'auto': how much work a call should hold, and the most iterations that it does


class StepsPerCall:
    """How many iterations may share a call: a number, or one chosen from the measured time of a step.

    Args:
      value: a number of iterations, or 'auto'.

    Raises:
      ConfigError: neither.

    Attributes:
      size: the number; None while it is not chosen.
    """

    def __init__(self, value: int | str) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not (value == "auto" or whole):
            raise ConfigError(f"steps_per_call is a number of iterations, at least 1, or 'auto'; found {value!r}")
        self.size = None if value == "auto" else int(value)
        self._done = 0
        self._began = 0.0

    def note(self, seconds: float) -> float | None:
        """Counts an iteration while the number is not chosen.

        Args:
          seconds: what all iterations of the run have spent in the step so far.

        Returns:
          Seconds an iteration, once enough were timed.
        """
        self._done += 1
        if self._done == _TIMED_AFTER:
            self._began = seconds
        return (seconds - self._began) / _TIMED if self._done == _TIMED_AFTER + _TIMED else None

    def choose(self, seconds: float) -> int:
        """Settles on as many iterations as a call of ten milliseconds holds, 64 at most; on one if that is not two."""
        fitting = int(_FILL_SECONDS / max(seconds, 1e-9))
        self.size = min(_MOST, fitting) if fitting >= 2 else 1
        return self.size


class Stepper:
    """Goes through the batches of an epoch, or of a whole training, for a loop.

    Args:
      loop: the loop; its counters move, and its runner is called.
      batches: host batches, in their order. Closed with the stepper.
      steps_per_call: how many iterations may share a call; kept by the loop.
      depth: batches that are sent to the device ahead of the one in use, where calls have one iteration.
    """

    def __init__(self, loop: "TrainLoop", batches: Iterable[PyTree], steps_per_call: StepsPerCall, depth: int) -> None:
        self._loop = loop
        self._runner = loop.runner
        self._steps = steps_per_call
        self._put = loop.runner.strategy.put_batch
        self._depth = depth
        self._host = _HostBatches(batches)
        self._ready: Iterator[PyTree] | None = None

    def advance(self, batch_idx: int, limit: int) -> int:
        """Runs the next iteration, or the next few in one call.

        Args:
          batch_idx: the index of its batch.
          limit: the most iterations that may run.

        Returns:
          How many ran; 0 when there is no batch left.
        """
        if self._steps.size is None:
            return self._timed(batch_idx)
        if self._steps.size > 1:
            return self._several(batch_idx, limit)
        if self._ready is None:
            self._ready = prefetch_to_device(self._host, self._put, self._depth)
        for batch in self._ready:
            self._loop.run_iter(batch_idx, batch)
            return 1
        return 0

    def close(self) -> None:
        """Closes the source of the batches."""
        if self._ready is not None:
            self._ready.close()  # type: ignore[attr-defined]
        self._host.close()

    def _timed(self, batch_idx: int) -> int:
        """One iteration, while it is not known how many should share a call."""
        for batch in self._host:
            self._loop.run_iter(batch_idx, self._put(batch))
            if (seconds := self._steps.note(self._runner.time.seconds.get("step", 0.0))) is not None:
                runner = self._runner
                cutting = runner.hook_list.cutting_each(runner)
                # all processes must take the same number, so it is the first one's
                seconds = runner.processes.exchange("the time of a step", seconds)[0]
                size = 1 if cutting else self._steps.choose(seconds)
                self._steps.size = size
                runner.logger.info(_told(size, seconds, cutting))
            return 1
        return 0

    def _several(self, batch_idx: int, limit: int) -> int:
        """As many iterations as may go into one call: up to the next at which a hook is due."""
        runner, loop = self._runner, self._loop
        first = next(self._host, None)
        if first is None:
            return 0
        runner.time.switch("hooks")
        loop.in_iteration = True
        runner.call_hook("before_train_iter", batch_idx=batch_idx, data_batch=first)
        size = self._steps.size or 1
        end = runner.hook_list.window_end(runner, loop.iter, loop.iter + min(size, max(limit, 1)))
        runner.time.switch("input")
        batches = [first, *self._host.like(first, end - loop.iter - 1)]
        runner.time.switch("hooks")
        plan = self._plan(batch_idx, batches)
        outputs = runner.train_several(batches, plan, size)
        last = batch_idx + len(batches) - 1
        runner.call_hook("after_train_iter", batch_idx=last, data_batch=batches[-1], outputs=outputs)
        loop.iter += 1
        loop.in_iteration = False
        if runner.step.unfit:
            self._steps.size = 1
            runner.logger.warning(_UNFIT)
        runner.time.switch("input")
        runner.interrupts.check()
        return len(batches)

    def _plan(self, batch_idx: int, batches: list[PyTree]) -> list[PlannedStep]:
        """What the host decides for each iteration; the counters then stand at the last of them."""
        runner, loop, wrapper = self._runner, self._loop, self._runner.optim_wrapper
        hooks, plan = runner.hook_list, []
        for i, batch in enumerate(batches):
            if i:
                hooks.call_ahead(runner, "after_train_iter", batch_idx=batch_idx + i - 1, data_batch=batches[i - 1])
                loop.iter += 1
                hooks.call_ahead(runner, "before_train_iter", batch_idx=batch_idx + i, data_batch=batch)
            updates = wrapper.advance()
            plan.append(PlannedStep(updates, {**wrapper.hyperparams, **runner.hyperparams}, wrapper.get_lr()))
        return plan


def _told(size: int, seconds: float, cutting: list[Any]) -> str:
    """What the log says of the choice."""
    if cutting:
        names = ", ".join(type(hook).__name__ for hook in cutting)
        return f"steps_per_call='auto': 1, since {names} acts at each iteration (`Hook.next_due` can say when)."
    return f"steps_per_call='auto': {size}, for a step of {seconds * 1e3:.3g} ms."


class _HostBatches:
    """An iterator that can give a batch back."""

    def __init__(self, batches: Iterable[PyTree]) -> None:
        self._source = iter(batches)
        self._returned: list[PyTree] = []

    def __iter__(self) -> "_HostBatches":
        return self

    def __next__(self) -> PyTree:
        return self._returned.pop() if self._returned else next(self._source)

    def like(self, first: PyTree, count: int) -> list[PyTree]:
        """At most `count` batches, up to the first that has not the form of `first`."""
        form = _form(first)
        batches: list[PyTree] = []
        while len(batches) < count:
            batch = next(self, None)
            if batch is None:
                break
            if _form(batch) != form:
                self._returned.append(batch)
                break
            batches.append(batch)
        return batches

    def close(self) -> None:
        """Closes the source."""
        if hasattr(self._source, "close"):
            self._source.close()


def _form(batch: PyTree) -> Any:
    if is_flat(batch):
        return [(name, leaf.shape, leaf.dtype) for name, leaf in batch.items()]
    leaves, structure = jax.tree.flatten(batch)
    return structure, [(np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]
