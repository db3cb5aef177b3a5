"""Iteration times and the exchange of times between processes."""

import time
from collections.abc import Callable
from typing import Any

import jax

from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.run_watch import RunWatch
from jengine.hooks.runner_protocol import RunnerProtocol


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Timer of validation and test iterations, and watch over the times of all processes.

    The scalars `data_time` and `time`, in seconds, are recorded for each iteration: by this hook in
    validation and test, and by the loop itself in training. The device works asynchronously, and
    the loop keeps a few steps in flight: a single `time` shows when a step was dispatched, and only
    the mean over a log interval is the true step time.

    About every 10 seconds of training the hook also updates `run.json`, and names the slowest of
    several processes in the next log line; see `RunWatch`.

    Args:
      block: wait for the outputs of each iteration before the clock is read: every `time` is exact,
        but the device is idle between steps.
      clock: returns the time in seconds.
    """

    def __init__(self, block: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self.acts_on = "state" if block else "metrics"
        self._block = block
        self._clock = clock
        self._last_time = 0.0
        self._data_time = 0.0
        self._eval_total = 0.0
        self._watch = RunWatch()

    def before_train(self, runner: RunnerProtocol) -> None:
        """Start the watch."""
        runner.run.limiter.blocks = self._block
        self._watch.start(runner)

    def after_train(self, runner: RunnerProtocol) -> None:
        """End what extras do while training runs."""
        self._watch.end(runner)

    def on_failure(self, runner: RunnerProtocol) -> None:
        """End what extras do while training runs."""
        self._watch.end(runner, failed=True)

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Exchange the times of the processes if it is due."""
        loop = runner.train_loop
        if loop.iter + 1 >= self._watch.next_step and not loop.steps_left:
            self._watch.exchange(runner, loop.iter + 1)

    def _before_epoch(self, runner: RunnerProtocol, mode: str = "train") -> None:
        self._last_time = self._clock()

    def before_val_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None
    ) -> None:
        """Record how long the loop waited for the batch."""
        if batch_idx == 0:  # also the next of several evaluations
            self._eval_total = 0.0
        self._data_time = self._clock() - self._last_time

    before_test_iter = before_val_iter

    def after_val_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None, outputs: Any = None
    ) -> None:
        """Record the times of the iteration, and the remaining time."""
        self._record(runner, "val", batch_idx, outputs)

    def after_test_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None, outputs: Any = None
    ) -> None:
        """Record the times of the iteration, and the remaining time."""
        self._record(runner, "test", batch_idx, outputs)

    def _record(self, runner: RunnerProtocol, mode: str, batch_idx: int, outputs: Any) -> None:
        if self._block:
            jax.block_until_ready(outputs)  # the call returns before the device is done
        now = self._clock()
        hub = runner.message_hub
        elapsed = now - self._last_time
        self._last_time = now
        hub.update_scalars({f"{mode}/data_time": self._data_time, f"{mode}/time": elapsed})
        self._eval_total += elapsed
        loop = runner.val_loop if mode == "val" else runner.test_loop
        if loop.epoch_length is not None:
            mean = self._eval_total / (batch_idx + 1)
            hub.update_info("eta", mean * (loop.epoch_length - batch_idx - 1))
