"""Checks of the loss, the number of classes, and what hooks save."""

import contextlib
import inspect
from collections.abc import Sequence

import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.config.json_codec import pack
from jengine.config.registry import HOOKS, is_built_in
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.train.traced_hooks import hook_names


class NonFiniteLossError(FloatingPointError, AssertionError):
    """Infinite or NaN loss; also an AssertionError, which MMEngine raises.

    Attributes:
      iteration: the iteration that computed it; None if unknown.
    """

    iteration: int | None = None


class HookStateError(ConfigError):
    """State of a hook of the user's that a checkpoint cannot hold."""


def check_saved_states(hooks: Sequence[Hook]) -> None:
    """Raise ConfigError, before training, if a checkpoint cannot hold the state of a hook of the
    user's.

    Those of the engine are tested. A state that exists only during training is checked when it is
    saved.
    """
    for name, hook in hook_names(hooks).items():
        state = None
        if not is_built_in(type(hook)):
            with contextlib.suppress(Exception):  # it may read what training sets
                state = hook.state_dict()
        try:
            pack(state, f"{name}.state_dict()")
        except TypeError as error:
            code = inspect.unwrap(type(hook).state_dict).__code__
            refusal = HookStateError(str(error))
            refusal.add_note(f"the method is in {code.co_filename}, line {code.co_firstlineno}")
            raise refusal from None


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
            if not np.isfinite(loss):
                runner.logger.error("the loss became infinite or NaN!")
                raise NonFiniteLossError(
                    f"the loss must be finite, got {loss} in iteration {runner.iter}"
                )
