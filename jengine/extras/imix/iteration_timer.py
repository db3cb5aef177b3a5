"""Times of iterations and epochs, with a summary at the end."""

import datetime
import time
from collections.abc import Callable

from jengine.config.annotations import Index
from jengine.config.registry import HOOKS
from jengine.extras.imix.hook_base import HookBase


@HOOKS.register_module()
class IterationTimerHook(HookBase):
    """Hook that records `iter_time` of each iteration and `epoch_time`, and logs a summary.

    The loop itself records `data_time`.

    All times are in seconds. The device runs asynchronously: a single `iter_time` is the host's
    time, but the mean over several iterations is the step time (see IterTimerHook). After a resume
    the summary covers the new iterations only.

    >>> IterationTimerHook(warmup_iter=10).warmup_iter
    10

    Args:
      warmup_iter: number of iterations to exclude from the speed summary, together with their time.
      clock: function that returns the time in seconds.
    """

    def __init__(
        self, warmup_iter: Index = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.warmup_iter = warmup_iter
        self._clock = clock
        self._train_start = self._epoch_start = self._iter_start = self._iter_end = (
            self._warmup_end
        ) = 0.0
        self._iters_done = self._epochs_done = 0

    def before_train(self) -> None:
        """Start the clock."""
        self._train_start = self._epoch_start = self._iter_end = self._warmup_end = self._clock()
        self._iters_done = self._epochs_done = 0

    def before_train_epoch(self) -> None:
        """Start the clock for the epoch."""
        self._epoch_start = self._iter_end = self._clock()

    def before_train_iter(self) -> None:
        """Start the clock for the iteration."""
        self._iter_start = self._clock()

    def after_train_iter(self) -> None:
        """Record the iteration time."""
        self._iter_end = self._clock()
        self.trainer.message_hub.update_scalar("train/iter_time", self._iter_end - self._iter_start)
        self._iters_done += 1
        if self._iters_done == self.warmup_iter:
            self._warmup_end = self._iter_end

    def after_train_epoch(self) -> None:
        """Record the epoch time."""
        epoch_time = self._clock() - self._epoch_start
        self._epochs_done += 1
        self.trainer.message_hub.update_scalar("train/epoch_time", epoch_time)
        self.trainer.logger.info(f"epoch {self.trainer.epoch} time:{_format_time(epoch_time)}")

    def after_train(self) -> None:
        """Log the summary."""
        logger = self.trainer.logger
        total_time = self._clock() - self._train_start
        # The first iterations compile, and are not part of the speed.
        num_iters = self._iters_done - self.warmup_iter
        if num_iters > 0:
            iters_time = self._iter_end - self._warmup_end
            logger.info(
                f"The Whole training speed:{num_iters} iterations in {_format_time(iters_time)} "
                f"({iters_time / num_iters:.4f} sec/iter)"
            )
        if self._epochs_done:
            mean = total_time / self._epochs_done
            logger.info(
                f"{self._epochs_done} epochs in {_format_time(total_time)} ({mean:.4f} sec/epoch)"
            )
        logger.info(f"total training time:{_format_time(total_time)}")


def _format_time(seconds: float) -> str:
    return str(datetime.timedelta(seconds=int(seconds)))
