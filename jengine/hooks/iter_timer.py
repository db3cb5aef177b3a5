"""Iteration times, and what a run reports about itself while it trains."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax

from jengine.config.plugins import load_each
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.run_record import update_record
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.parallel.processes import get_processes

PERIOD = 10.0  # seconds between two exchanges


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Timer of validation and test iterations, and watch over the times of all processes.

    The scalars `data_time` and `time`, in seconds, are recorded for each iteration: by this hook in
    validation and test, and by the loop itself in training. The device works asynchronously, and
    the loop keeps a few steps in flight: a single `time` shows when a step was dispatched, and only
    the mean over a log interval is the true step time.

    About every 10 seconds of training the processes exchange times and requests, at the same
    iterations, since each computes the next one from the same values. The hook then updates
    `run.json`.

    A watch is a class in the section "run_watches" of an extra, made without arguments:
    `start(runner)` is called before training, `request(runner)` before an exchange, on each
    process; `act(runner, completed, requests)` with those of all processes, and it returns the
    step of the next exchange at the latest; `end(runner, failed)` after training.

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
        self._due: Any = 1  # completed iterations at the next exchange
        self._last_step = 0  # those at the last one
        self._last_seconds = 0.0
        self._last_record = 0.0
        self._watches = [watch() for watch in load_each("run_watches")]

    def before_train(self, runner: RunnerProtocol) -> None:
        """Start to watch with the next iteration."""
        runner.run.limiter.blocks = self._block
        self._last_step = runner.iter
        self._wait_until(runner.iter + 1)
        self._last_seconds = self._last_record = runner.train_loop.seconds
        for watch in self._watches:
            watch.start(runner)

    def after_train(self, runner: RunnerProtocol) -> None:
        """End what extras do while training runs."""
        for watch in self._watches:
            watch.end(runner, False)

    def on_failure(self, runner: RunnerProtocol) -> None:
        """End what extras do while training runs, without a wait for the device."""
        for watch in self._watches:
            watch.end(runner, True)

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Exchange the times of the processes if it is due."""
        loop = runner.train_loop
        completed = loop.iter + 1
        if completed < self._due or loop.steps_left:
            self._wait_until(max(self._due, completed + loop.steps_left))  # the end of a chunk
            return
        done = completed - self._last_step
        requests = tuple(watch.request(runner) for watch in self._watches)
        elapsed = loop.seconds - self._last_seconds
        # a wait for the slowest process, as in the step itself
        with runner.stopwatch.part("step"):
            gathered = get_processes().all_gather("the times and requests", (elapsed, requests))
        if loop.seconds - self._last_record >= PERIOD:
            self._last_record = loop.seconds
            update_record(runner, background=True)  # what a kill loses is counted from here
        self._last_step = completed
        self._last_seconds = loop.seconds
        # Growing by two at most: the first iterations compile, and a loop may become slower
        due = math.ceil(PERIOD * done / max(gathered[0][0], 1e-9))
        self._wait_until(completed + max(1, min(due, 2 * done)))
        for i, watch in enumerate(self._watches):
            latest = watch.act(runner, completed, [each[i] for _, each in gathered])
            self._wait_until(min(self._due, latest))

    def _wait_until(self, completed: float) -> None:
        self._due = completed
        if not self._block:  # else each step, which keeps chunks at one
            self.every = int(completed)  # its first multiple is that iteration

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

    def _after_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        """Record the times of an iteration of validation or test, and the remaining time."""
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
