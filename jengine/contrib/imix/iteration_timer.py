"""Times iterations and epochs, and sums them up at the end."""

import datetime
import time
from collections.abc import Callable

from jengine.annotations import Index
from jengine.contrib.imix.hook_base import HookBase
from jengine.registry import HOOKS


@HOOKS.register_module()
class IterationTimerHook(HookBase):
    """Records `data_time` and `iter_time` of each iteration and `epoch_time`, in seconds, and logs a summary.

    The device works asynchronously: a single `iter_time` says how long the host took, the mean over several is the time
    of a step (see IterTimerHook). Iterations count from where training starts, so a resumed run speaks of its own.

    Args:
      warmup_iter: iterations that the summary of the speed leaves out, together with their time.
      clock: gives the time in seconds.
    """

    def __init__(self, warmup_iter: Index = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.warmup_iter = warmup_iter
        self._clock = clock
        self._began = self._epoch_began = self._iter_began = self._then = self._warm = 0.0
        self._done = self._epochs_done = 0

    def before_train(self) -> None:
        """Starts the clock."""
        self._began = self._epoch_began = self._then = self._warm = self._clock()
        self._done = self._epochs_done = 0

    def before_train_epoch(self) -> None:
        """Starts the clock of the epoch."""
        self._epoch_began = self._then = self._clock()

    def before_train_iter(self) -> None:
        """Records how long the data took."""
        self._iter_began = self._clock()
        self.trainer.message_hub.update_scalar("train/data_time", self._iter_began - self._then)

    def after_train_iter(self) -> None:
        """Records how long the iteration took."""
        self._then = self._clock()
        self.trainer.message_hub.update_scalar("train/iter_time", self._then - self._iter_began)
        self._done += 1
        if self._done == self.warmup_iter:
            self._warm = self._then

    def after_train_epoch(self) -> None:
        """Records how long the epoch took."""
        took = self._clock() - self._epoch_began
        self._epochs_done += 1
        self.trainer.message_hub.update_scalar("train/epoch_time", took)
        self.trainer.logger.info(f"epoch {self.trainer.epoch} time:{_text(took)}")

    def after_train(self) -> None:
        """Logs the summary."""
        logger, now = self.trainer.logger, self._clock()
        counted = self._done - self.warmup_iter
        if counted > 0:
            total = self._then - self._warm
            logger.info(
                f"The Whole training speed:{counted} iterations in {_text(total)} ({total / counted:.4f} sec/iter)"
            )
        if self._epochs_done:
            mean = (now - self._began) / self._epochs_done
            logger.info(f"{self._epochs_done} epochs in {_text(now - self._began)} ({mean:.4f} sec/epoch)")
        logger.info(f"total training time:{_text(now - self._began)}")


def _text(seconds: float) -> str:
    return str(datetime.timedelta(seconds=int(seconds)))
