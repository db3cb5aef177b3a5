"""Check of some losses while training runs."""

import math

from jengine.config.annotations import Count
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.loss_watch import NonFiniteLossError


@HOOKS.register_module()
class CheckInvalidLossHook(Hook):
    """Check of the loss every `interval` training iterations, which ends training with
    NonFiniteLossError.

    Each check waits for the device, errors are detected late, and nothing is saved: you should
    prefer `NumericsGuardHook`, which checks every step and skips the bad ones.

    Args:
      interval: iterations between two checks.
    """

    def __init__(self, interval: Count = 50) -> None:
        self.interval = interval
        self.every = interval

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Check the loss."""
        if outputs:
            loss = float(outputs["loss"])  # waits for the device
            if not math.isfinite(loss):
                runner.logger.error("the loss became infinite or NaN!")
                raise NonFiniteLossError(
                    f"the loss must be finite, got {loss} in iteration {runner.iter}"
                )
