"""End training when the loss is no longer a finite number."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class CheckInvalidLossHook(Hook):
    """Check the loss every `interval` training iterations, waiting for it, and end training if it is not finite.

    It detects an error late and saves nothing. `NumericsGuardHook` checks every step and skips the bad ones.

    Args:
      interval: iterations from one check to the next.

    Raises:
      AssertionError: from the hook, the loss is infinite or NaN.
    """

    def __init__(self, interval: int = 50) -> None:
        self.interval = interval

    def next_step(self, runner: Runner, step: int) -> float:
        """Return the step of the next check."""
        return self.next_multiple(self.interval, step)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Check the loss if it is due."""
        if outputs and self.every_n_train_iters(runner, self.interval):
            loss = float(outputs["loss"])
            if not np.isfinite(loss):
                runner.logger.error("the loss became infinite or NaN!")
                raise AssertionError(f"the loss is {loss} in iteration {runner.iter}")
