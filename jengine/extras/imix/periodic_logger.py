"""iMIX's logging hooks: one passes the run to writers, one logs a text at each stage."""

from collections.abc import Sequence
from typing import Any

import jax

from jengine.config.annotations import Count, is_mapping
from jengine.config.errors import config_path
from jengine.config.registry import HOOKS
from jengine.extras.imix.hook_base import HookBase
from jengine.extras.imix.log_buffer import LogBuffer
from jengine.extras.imix.writers import WRITERS, LogBufferWriter, TensorboardLoggerHook


@HOOKS.register_module()
class PeriodicLogger(HookBase):
    """Hook that passes the run to writers every `log_config_period` iterations, on the first
    process only.

    Training by epochs counts from the start of each epoch, and TensorBoard also gets the values at
    the end of each epoch; training by iterations also writes the last iteration. Metrics leave the
    device only when a line is written, together with EvaluateHook's results and the images and
    histograms from hooks (`HookBase.put_image`, `put_histogram`).

    >>> hook = PeriodicLogger(loggers=[dict(type="CommonMetricLoggerHook")], log_config_period=10)

    Args:
      loggers: writers or writer configs; `CommonMetricLoggerHook` and `JSONLoggerHook` by default.
      log_config_period: iterations between two lines.
    """

    log_buffer: LogBuffer

    def __init__(self, loggers: Sequence[Any] | None = None, log_config_period: Count = 50) -> None:
        self.log_config_period = log_config_period
        if loggers is None:
            loggers = [dict(type="CommonMetricLoggerHook"), dict(type="JSONLoggerHook")]
        self.loggers: list[LogBufferWriter] = []
        for index, logger in enumerate(loggers):
            with config_path("loggers", index):
                built = WRITERS.build(logger) if is_mapping(logger) else logger
                if not isinstance(built, LogBufferWriter):
                    raise TypeError(
                        f"a writer must be a LogBufferWriter or the config of one, got {built!r}"
                    )
                self.loggers.append(built)
        # Images and results are kept only if a writer will take them: they are large.
        self.log_buffer = LogBuffer(keep=any(logger.writes_events for logger in self.loggers))

    def before_train(self) -> None:
        """Start the writers."""
        if jax.process_index() == 0:
            for logger in self.loggers:
                logger.begin(self.trainer)

    def after_train_iter(self) -> None:
        """Write every `log_config_period` iterations, and after the last one of a training by
        iterations.
        """
        trainer = self.trainer
        is_last = not trainer.train_loop.by_epoch and self.is_last_train_iter(trainer)
        if self.every_n_inner_iters(self.inner_iter, self.log_config_period) or is_last:
            self._write(self.loggers)

    def after_train_epoch(self) -> None:
        """Write the values at the end of the epoch to TensorBoard."""
        self._write(
            [logger for logger in self.loggers if isinstance(logger, TensorboardLoggerHook)]
        )

    def after_train(self) -> None:
        """Write the remaining events and close the writers, also after an error."""
        self._write_events()
        for logger in self.loggers:
            logger.close()

    def _write(self, loggers: Sequence[LogBufferWriter]) -> None:
        if jax.process_index() == 0:
            for logger in loggers:
                logger.write(self.trainer)
            self._write_events()

    def _write_events(self) -> None:
        events = self.log_buffer.pop_all()
        if any(events):
            for logger in self.loggers:
                logger.write_events(*events)


@HOOKS.register_module()
class TextLoggerHook(HookBase):
    """Hook that logs a text before training, after each iteration and after training, to debug the
    hook order.

    Args:
      text: the text.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text

    def before_train(self) -> None:
        """Log the text."""
        self.trainer.logger.info(f"before_train:{self.text}")

    def after_train_iter(self) -> None:
        """Log the text."""
        self.trainer.logger.info(f"after_train_iter:{self.text}")

    def after_train(self) -> None:
        """Log the text."""
        self.trainer.logger.info(f"after_train:{self.text}")
