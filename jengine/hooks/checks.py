"""Checks of the loss, the number of classes, and what hooks save."""

import contextlib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.config.json_codec import pack
from jengine.config.registry import HOOKS, is_built_in
from jengine.data.batch_check import Batch
from jengine.extras.diagnose.locate import locate_sizes
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.adapters import describe_module
from jengine.model.labels import LABEL_SETTINGS, OUTPUT_SETTINGS
from jengine.train.traced_hooks import hook_names


class NonFiniteLossError(FloatingPointError, AssertionError):
    """Infinite or NaN loss; also an AssertionError, which MMEngine raises."""


class HookStateError(ConfigError):
    """State of a hook of the user's that a checkpoint cannot hold."""


def describe_loss(
    iteration: int,
    value: float,
    now: int,
    labels: str | None,
    rates: Mapping[str, Sequence[float]],
    paths: Sequence[str | None],
    command: str,
    cfg: Any = None,
) -> str:
    """Return the message about a loss that is not finite, the likely cause first.

    Args:
      iteration, value: of the loss.
      now: the iteration at which it was fetched.
      labels: what is wrong with the labels of its batch.
      rates: the learning rates of the groups, by name.
      paths: the newest checkpoints from before and after it.
      command: trains from there, or from scratch, with the numerics guard.
      cfg: the config, for the setting with the number of outputs.
    """
    loss = f"the loss of iteration {iteration}, counted from 0, is {value} (noticed at iteration {now})"
    path, later = paths
    newest = (
        f"The newest checkpoint from before it is {path}."
        if path
        else "No checkpoint is from before it."
    )
    if later:
        newest += f" Do not resume from {later}, which was saved after it."
    elif not path:
        newest = "No checkpoint was saved, since its parameters could not be trusted."
    if labels is not None:
        labels = labels.replace(
            LABEL_SETTINGS, "in the data or the settings of `train_dataloader.dataset`"
        )
        count = re.search(r"the outputs have (\d+) classes", labels)
        sizes = locate_sizes(cfg, [int(count[1])]) if count else {}
        setting = " or ".join(f"`{path}`, now {size}" for path, size in sizes.items())
        if not setting and (module := describe_module(cfg)) is not None:
            setting = f"an argument of {module} in `model.module`, or in its code"
        if setting:
            labels = labels.replace(f" {OUTPUT_SETTINGS}", f" by {setting}")
        return f"{labels}. Therefore {loss}. {newest}"
    # With several groups, `base_lr` is the rate of none
    largest = max(
        (rate for name, group in rates.items() if not name.endswith("base_lr") for rate in group),
        default=0,
    )
    rate = f", here {largest:g}," if largest else ""
    # At a rate that no run has, updates of clipped gradients are too large as well.
    clip = (
        ", or limit the gradients with `optim_wrapper.clip_grad=dict(max_norm=1.0)`"
        if largest < 10
        else ""
    )
    cause = (
        f"Often the learning rate{rate} is too large: set a smaller "
        f"`optim_wrapper.optimizer.lr`{clip}"
        if iteration
        else "No update came before it: look for values that are not finite, or too large, in the "
        "first batch, and for "
        "a division, root or logarithm of zero in the model and its loss"
    )
    return (
        f"{loss}. {cause}. {newest}\n"
        "If that is not it, train with the numerics guard, which drops such steps, and after "
        "several in a row stores "
        f"the batch and the state of one, for `jengine replay` to compute again:\n  {command}"
    )


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
      prefer
    `NumericsGuardHook`, which checks every step and skips the bad ones.

    Args:
      interval: iterations between two checks.
    """

    def __init__(self, interval: Count = 50) -> None:
        self.interval = interval

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the step of the next check."""
        return self.next_multiple(self.interval, step)

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Check the loss if it is due."""
        if outputs and self.every_n_train_iters(runner, self.interval):
            loss = float(outputs["loss"])  # waits for the device
            if not np.isfinite(loss):
                runner.logger.error("the loss became infinite or NaN!")
                raise NonFiniteLossError(
                    f"the loss must be finite, got {loss} in iteration {runner.iter}"
                )
