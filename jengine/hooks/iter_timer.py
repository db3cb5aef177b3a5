"""Time iterations and estimate the remaining time of the run."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS
from jengine.train.scanned_step import ChunkMetrics

_NAMES = {mode: (f"{mode}/data_time", f"{mode}/time") for mode in ("train", "val", "test")}


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Record `data_time` and `time` of each iteration, in seconds, and the remaining time as the info `eta`.

    The device works asynchronously, and the loop keeps a few steps in flight: a single `time` shows when a step
    was dispatched, and its mean over a log interval is the true time of a step. With `block=True` every iteration
    waits for its outputs, so that each single `time` is true as well, at the price of an idle device.

    Args:
      block: wait for the outputs of each iteration before its time is taken.
      clock: returns the time in seconds.
    """

    priority = "NORMAL"

    def __init__(self, block: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._block = block
        self._clock = clock
        self._then = 0.0
        self._data_time = 0.0
        self._start_iter = 0
        self._train_total = 0.0
        self._eval_total = 0.0

    def next_step(self, runner: Runner, step: int) -> float:
        """Return each step with `block=True`; otherwise none, so that the steps of a chunk are timed together."""
        return step if self._block else math.inf

    def before_train(self, runner: Runner) -> None:
        """Record the start of training, so that a resumed run estimates from its own iterations alone."""
        self._start_iter = runner.iter
        self._train_total = 0.0

    def _before_epoch(self, runner: Runner, mode: str = "train") -> None:
        self._then = self._clock()
        self._eval_total = 0.0

    def _before_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        self._data_time = self._clock() - self._then

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        if self._block:
            import jax

            jax.block_until_ready(outputs)
        took = self._lap()
        hub, (data_time, time_) = runner.message_hub, _NAMES[mode]
        hub.update_scalar(data_time, self._data_time)
        hub.update_scalar(time_, took)
        if mode == "train":
            self._estimate(runner, took)
            return
        self._eval_total += took
        loop = runner.val_loop if mode == "val" else runner.test_loop
        hub.update_info("eta", self._eval_total / (batch_idx + 1) * (len(loop.dataloader) - batch_idx - 1))

    def after_train_chunk(self, runner: Runner, batch_idx: int, data_batch: Any, metrics: ChunkMetrics) -> None:
        """Record the mean time of the steps of a chunk for each of them."""
        took, count = self._lap(), metrics.num_steps
        for name, seconds in zip(_NAMES["train"], (self._data_time, took), strict=True):
            runner.message_hub.update_scalar_batch(name, np.full(count, seconds / count), runner.iter - count + 1)
        self._estimate(runner, took)

    def _lap(self) -> float:
        """Return the seconds since the last iteration."""
        now = self._clock()
        took, self._then = now - self._then, now
        return took

    def _estimate(self, runner: Runner, took: float) -> None:
        """Estimate the time to the end of training from the iterations of this session."""
        self._train_total += took
        done = runner.iter + 1
        mean = self._train_total / (done - self._start_iter)
        runner.message_hub.update_info("eta", mean * (runner.max_iters - done))

    def _after_epoch(self, runner: Runner, mode: str = "train") -> None:
        # A validation inside training is not part of the next training iteration.
        self._then = self._clock()

    def after_val(self, runner: Runner) -> None:
        """Start the clock of the training iteration that follows."""
        self._then = self._clock()
