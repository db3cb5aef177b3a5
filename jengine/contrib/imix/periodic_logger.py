"""Log the training at intervals, as iMIX does."""

from collections.abc import Sequence
from typing import Any

import jax

from jengine.annotations import Count
from jengine.contrib.imix.hook_base import HookBase
from jengine.contrib.imix.log_buffer import LogBuffer
from jengine.contrib.imix.writers import WRITERS, LogBufferWriter, TensorboardLoggerHook
from jengine.errors import config_path
from jengine.registry import HOOKS


@HOOKS.register_module()
class PeriodicLogger(HookBase):
    """Hands the run to its writers every `log_config_period` iterations, on the first process alone.

    Training by epochs counts anew in each epoch, and TensorBoard gets what stands at the end of each as well; training
    by iterations also writes the last one. A line is the only moment at which numbers leave the device; with it go the
    results of EvaluateHook, and the images and histograms that hooks have put (`HookBase.put_image`, `put_histogram`).

    Args:
      loggers: the writers, each a config or built; `CommonMetricLoggerHook` and `JSONLoggerHook` by default.
      log_config_period: iterations between two lines.

    Attributes:
      buffer: what waits besides the numbers of training.

    Raises:
      TypeError, ValueError: a period that is no positive integer; something that is no writer.
    """

    def __init__(self, loggers: Sequence[Any] | None = None, log_config_period: Count = 50) -> None:
        self.log_config_period = log_config_period
        if loggers is None:
            loggers = [dict(type="CommonMetricLoggerHook"), dict(type="JSONLoggerHook")]
        self.loggers: list[LogBufferWriter] = []
        for index, logger in enumerate(loggers):
            with config_path("loggers", index):
                built = WRITERS.build(logger) if hasattr(logger, "items") else logger
                if not isinstance(built, LogBufferWriter):
                    raise TypeError(f"a writer is a LogBufferWriter or a config of one, found {built!r}")
                self.loggers.append(built)
        self.buffer = LogBuffer(keep=any(logger.takes_more for logger in self.loggers))

    def before_train(self) -> None:
        """Tells the writers where training starts."""
        if jax.process_index() == 0:
            for logger in self.loggers:
                logger.begin(self.trainer)

    def after_train_iter(self) -> None:
        """Writes the iteration when it is due."""
        trainer = self.trainer
        last = not trainer.train_loop.by_epoch and self.is_last_train_iter(trainer)
        if self.every_n_inner_iters(self.inner_iter, self.log_config_period) or last:
            self._write(self.loggers)

    def after_train_epoch(self) -> None:
        """Writes the end of the epoch to TensorBoard."""
        self._write([logger for logger in self.loggers if isinstance(logger, TensorboardLoggerHook)])

    def after_train(self) -> None:
        """Closes the writers; also after an error."""
        self._write_more()
        for logger in self.loggers:
            logger.close()

    def _write(self, loggers: Sequence[LogBufferWriter]) -> None:
        if jax.process_index() == 0:
            for logger in loggers:
                logger.write(self.trainer)
            self._write_more()

    def _write_more(self) -> None:
        waiting = self.buffer.take()
        if any(waiting):
            for logger in self.loggers:
                logger.write_more(*waiting)


@HOOKS.register_module()
class TextLoggerHook(HookBase):
    """Logs a text before training, after each iteration and after training: a hook to see the order of others by.

    Args:
      text: the text.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text

    def before_train(self) -> None:
        """Logs the text."""
        self.trainer.logger.info(f"before_train:{self.text}")

    def after_train_iter(self) -> None:
        """Logs the text."""
        self.trainer.logger.info(f"after_train_iter:{self.text}")

    def after_train(self) -> None:
        """Logs the text."""
        self.trainer.logger.info(f"after_train:{self.text}")
