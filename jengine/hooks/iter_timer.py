"""Iteration times and the estimated remaining time."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.run_watch import RunWatch
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.train.scanned_step import ChunkMetrics


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Timer of iterations: the scalars `data_time` and `time` in seconds, and the remaining time as
    the info `eta`.

    The device works asynchronously, and the loop keeps a few steps in flight: a single `time` shows
    when a step was dispatched, and only the mean over a log interval is the true step time.

    About every 10 seconds it also updates `run.json`, and names the slowest of several processes in
    the next log line; see `RunWatch`.

    Args:
      block: wait for the outputs of each iteration before reading the clock: every `time` is exact,
        but the device is idle between steps.
      clock: returns the time in seconds.
    """

    def __init__(self, block: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._block = block
        self._clock = clock
        self._last_time = 0.0
        self._data_time = 0.0
        self._start_iter = 0
        self._max_iters: float = math.inf
        self._train_total = 0.0
        self._eval_total = 0.0
        self._watch = RunWatch()

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return `step` with `block=True`.

        Otherwise never, so that the steps of a chunk are timed together.
        """
        return step if self._block else math.inf

    def before_train(self, runner: RunnerProtocol) -> None:
        """Record the first iteration: a resumed run estimates from this session only."""
        self._start_iter = runner.iter
        self._train_total = 0.0
        self._watch.start(runner)

    def after_train(self, runner: RunnerProtocol) -> None:
        """End what extras do while training runs."""
        self._watch.end(runner)

    def on_failure(self, runner: RunnerProtocol) -> None:
        """End what extras do while training runs."""
        self._watch.end(runner, failed=True)

    def _before_epoch(self, runner: RunnerProtocol, mode: str = "train") -> None:
        self._last_time = self._clock()
        self._eval_total = 0.0
        # Fixed for an epoch; the query would cost more than a short iteration.
        self._max_iters = runner.max_iters

    def before_train_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None
    ) -> None:
        """Record how long the loop waited for the batch."""
        self._data_time = self._clock() - self._last_time

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Record the times of the iteration, and the remaining time."""
        if self._block:
            jax.block_until_ready(outputs)  # the call returns before the device is done
        elapsed = self._finish_steps(runner)
        runner.message_hub.update_scalars(
            {"train/data_time": self._data_time, "train/time": elapsed}
        )

    def _before_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None, mode: str = "train"
    ) -> None:
        if batch_idx == 0:  # also the next of several evaluations
            self._eval_total = 0.0
        self._data_time = self._clock() - self._last_time

    def _after_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        if self._block:
            jax.block_until_ready(outputs)
        now = self._clock()
        hub = runner.message_hub
        elapsed = now - self._last_time
        self._last_time = now
        hub.update_scalars({f"{mode}/data_time": self._data_time, f"{mode}/time": elapsed})
        self._eval_total += elapsed
        loop = runner.val_loop if mode == "val" else runner.test_loop
        if loop.epoch_length is not None:
            hub.update_info(
                "eta", self._eval_total / (batch_idx + 1) * (loop.epoch_length - batch_idx - 1)
            )

    def after_train_chunk(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch, metrics: ChunkMetrics
    ) -> None:
        """Record the mean step time for each step of a chunk."""
        elapsed = self._finish_steps(runner)
        count = metrics.num_steps
        for name, seconds in (("train/data_time", self._data_time), ("train/time", elapsed)):
            # Steps within one call have no times of their own
            runner.message_hub.update_scalar_batch(
                name, np.full(count, seconds / count), runner.iter - count + 1
            )

    def _finish_steps(self, runner: RunnerProtocol) -> float:
        """Return the seconds since the last steps, and estimate the remaining time from this
        session.
        """
        now = self._clock()
        elapsed = now - self._last_time
        self._last_time = now
        self._train_total += elapsed
        completed = runner.train_loop.iter + 1
        if self._max_iters != math.inf:
            # Since this session's start: a resume may be on another machine.
            mean = self._train_total / (completed - self._start_iter)
            runner.message_hub.update_info("eta", mean * (self._max_iters - completed))
        if completed >= self._watch.next_step:
            self._watch.exchange(runner, completed, self._train_total)
        return elapsed

    def _after_epoch(self, runner: RunnerProtocol, mode: str = "train") -> None:
        # A validation inside training is not part of the next training iteration.
        self._last_time = self._clock()

    def after_val(self, runner: RunnerProtocol) -> None:
        """Start the clock of the next training iteration."""
        self._last_time = self._clock()
