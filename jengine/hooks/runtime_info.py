"""Progress of the run (epoch, iteration, learning rate, losses, metrics) in the message hub."""

import math
import numbers
from typing import Any

from jengine.config.registry import HOOKS
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.versions import __version__


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Progress and results of the run in the message hub, from which all loggers read.

    The loop itself records metrics, learning rates and times of each training iteration.
    """

    priority = "VERY_HIGH"

    def __init__(self) -> None:
        self._stage_before_val: str | None = None

    def before_run(self, runner: RunnerProtocol) -> None:
        """Record the config, the seed, the experiment name and the version."""
        infos: dict[str, Any] = dict(cfg=runner.run.described.cfg_text, jengine_version=__version__)
        infos |= dict(seed=runner.seed, experiment_name=runner.experiment_name)
        runner.message_hub.update_info_dict(infos)

    def before_train(self, runner: RunnerProtocol) -> None:
        """Record the first iteration, the training length, and the dataset metainfo."""
        hub = runner.message_hub
        progress = dict(epoch=runner.epoch, iter=runner.iter, max_epochs=runner.max_epochs)
        hub.update_info_dict({"loop_stage": "train", **progress})
        if math.isfinite(runner.max_iters):
            hub.update_info("max_iters", runner.max_iters)
        if (meta := runner.train_dataloader.metainfo) is not None:
            hub.update_info("dataset_meta", meta)

    def before_train_epoch(self, runner: RunnerProtocol) -> None:
        """Record the epoch."""
        runner.message_hub.update_info("epoch", runner.epoch)

    def before_val(self, runner: RunnerProtocol) -> None:
        """Set the stage, and begin the means over this validation."""
        runner.message_hub.start_pass("val")
        self._stage_before_val = runner.message_hub.get_info("loop_stage")
        runner.message_hub.update_info("loop_stage", "val")

    def after_val_epoch(
        self, runner: RunnerProtocol, metrics: dict[str, float] | None = None
    ) -> None:
        """Record the metrics as `val/…`."""
        self._record_metrics(runner, "val", metrics)

    def after_val(self, runner: RunnerProtocol) -> None:
        """Restore the stage that the validation interrupted."""
        if self._stage_before_val is None:
            runner.message_hub.pop_info("loop_stage")
        else:
            runner.message_hub.update_info("loop_stage", self._stage_before_val)

    def after_train(self, runner: RunnerProtocol) -> None:
        """Remove the stage."""
        runner.message_hub.pop_info("loop_stage")

    def before_test(self, runner: RunnerProtocol) -> None:
        """Set the stage, and begin the means over this test."""
        runner.message_hub.start_pass("test")
        runner.message_hub.update_info("loop_stage", "test")

    def after_test_epoch(
        self, runner: RunnerProtocol, metrics: dict[str, float] | None = None
    ) -> None:
        """Record the metrics as `test/…`."""
        self._record_metrics(runner, "test", metrics)

    after_test = after_train

    @staticmethod
    def _record_metrics(
        runner: RunnerProtocol, mode: str, metrics: dict[str, float] | None
    ) -> None:
        for name, value in (metrics or {}).items():
            # others draw no curve
            if isinstance(value, numbers.Number) or getattr(value, "size", 0) == 1:
                runner.message_hub.update_scalar(f"{mode}/{name}", value)
            else:
                runner.message_hub.update_info(f"{mode}/{name}", value)
