"""Record the progress of the run (epoch, iteration, learning rate, losses, metrics) in the message hub."""

import math
import numbers
from typing import Any

from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS
from jengine.train.scanned_step import ChunkMetrics


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Keep the message hub up to date; all loggers read from it.

    Losses are stored as device arrays, which are not fetched before the first read.
    """

    priority = "VERY_HIGH"
    runs_ahead = True

    def __init__(self) -> None:
        self._stage_before_val: str | None = None

    def before_run(self, runner: Runner) -> None:
        """Record the config, the seed, the experiment's name and the version."""
        from jengine import __version__

        runner.message_hub.update_info_dict(
            dict(
                cfg=runner.cfg_text,
                seed=runner.seed,
                experiment_name=runner.experiment_name,
                jengine_version=__version__,
            )
        )

    def before_train(self, runner: Runner) -> None:
        """Record the first iteration, the length of training, and the metainfo of the dataset."""
        hub = runner.message_hub
        hub.update_info("loop_stage", "train")
        hub.update_info("epoch", runner.epoch)
        hub.update_info("iter", runner.iter)
        hub.update_info("max_epochs", runner.max_epochs)
        if math.isfinite(runner.max_iters):
            hub.update_info("max_iters", runner.max_iters)
        if (meta := runner.train_dataloader.metainfo) is not None:
            hub.update_info("dataset_meta", meta)

    def before_train_epoch(self, runner: Runner) -> None:
        """Record the epoch."""
        runner.message_hub.update_info("epoch", runner.epoch)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Record the iteration and its learning rate, under each name of `get_lr` that of the first group.

        It is the group of the first parameter as the model defines them.
        """
        hub = runner.message_hub
        hub.update_info("iter", runner.iter)
        rates = {}
        for name, values in runner.optim_wrapper.get_lr().items():
            rates[f"train/{name}"] = values[0]
        hub.update_scalars(rates)

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Outputs = None) -> None:
        """Record the metrics of the step."""
        scalars = {}
        for name, value in (outputs or {}).items():
            scalars[f"train/{name}"] = value
        runner.message_hub.update_scalars(scalars)

    def after_train_chunk(self, runner: Runner, batch_idx: int, data_batch: Any, metrics: ChunkMetrics) -> None:
        """Record the metrics of all steps of a chunk."""
        hub, first = runner.message_hub, runner.iter - metrics.num_steps + 1
        for name, values in metrics.values.items():
            hub.update_scalar_batch(f"train/{name}", values, first, metrics.reported(name))

    def before_val(self, runner: Runner) -> None:
        """Set the stage."""
        self._stage_before_val = runner.message_hub.get_info("loop_stage")
        runner.message_hub.update_info("loop_stage", "val")

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Record the metrics as `val/…`."""
        self._record_metrics(runner, "val", metrics)

    def after_val(self, runner: Runner) -> None:
        """Restore the stage that the validation interrupted."""
        if self._stage_before_val is None:
            runner.message_hub.pop_info("loop_stage")
        else:
            runner.message_hub.update_info("loop_stage", self._stage_before_val)

    def after_train(self, runner: Runner) -> None:
        """Remove the stage."""
        runner.message_hub.pop_info("loop_stage")

    def before_test(self, runner: Runner) -> None:
        """Set the stage."""
        runner.message_hub.update_info("loop_stage", "test")

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Record the metrics as `test/…`."""
        self._record_metrics(runner, "test", metrics)

    def after_test(self, runner: Runner) -> None:
        """Remove the stage."""
        runner.message_hub.pop_info("loop_stage")

    @staticmethod
    def _record_metrics(runner: Runner, mode: str, metrics: dict[str, float] | None) -> None:
        for name, value in (metrics or {}).items():
            if _is_scalar(value):
                runner.message_hub.update_scalar(f"{mode}/{name}", value)
            else:
                runner.message_hub.update_info(f"{mode}/{name}", value)


def _is_scalar(value: Any) -> bool:
    """Return whether a metric is a number or an array of one element."""
    return isinstance(value, numbers.Number) or (hasattr(value, "size") and value.size == 1)
