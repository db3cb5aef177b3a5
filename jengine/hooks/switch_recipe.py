"""Trains by another recipe from some epochs on."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jengine.errors import ConfigError, closest
from jengine.hooks.hook import Hook
from jengine.registry import HOOKS

if TYPE_CHECKING:
    from jengine.runner import Runner

_KEYS = ("action_epoch", "loss", "hyperparams")


@HOOKS.register_module()
class SwitchRecipeHook(Hook):
    """Changes losses and numbers of the step at the beginning of some epochs, without tracing anything anew.

    Both are traced numbers that the host controls. `loss=1` chooses the second of the losses that a `SwitchedLoss` was
    made of: all are compiled in, the chosen one is computed. `hyperparams=dict(mixup=0.0)` is what the model's loss, or
    a traced hook that augments batches, reads as `hyperparams['mixup']`.

    A resumed run is where it was: whatever was to act before is done again, in order.

    Args:
      schedule: one dict for each change: `action_epoch` (counted from 1: it holds in that epoch), and `loss`,
        `hyperparams` or both. Each of the hyperparams needs a value from epoch 1 on; the loss is the first until then.

    Raises:
      ConfigError: another form; two changes in one epoch; a number without a first value.
    """

    def __init__(self, schedule: Sequence[Mapping[str, Any]]) -> None:
        self.schedule = sorted((_checked(item) for item in schedule), key=lambda item: item["action_epoch"])
        epochs = [item["action_epoch"] for item in self.schedule]
        for epoch in epochs:
            if epochs.count(epoch) > 1:
                raise ConfigError(f"SwitchRecipeHook: two changes have the action_epoch {epoch}")
        first = {name for item in self.schedule if item["action_epoch"] == 1 for name in item["hyperparams"]}
        for item in self.schedule:
            for name in item["hyperparams"]:
                if name not in first:
                    raise ConfigError(
                        f"SwitchRecipeHook: {name!r} changes in epoch {item['action_epoch']} and has no value before: "
                        f"give one in a change with action_epoch=1{closest(name, first)}"
                    )

    def before_train(self, runner: "Runner") -> None:
        """Puts the recipe of the current epoch in force, after a restart as well."""
        if any(item["loss"] is not None for item in self.schedule):
            runner.hyperparams["loss_index"] = 0
        for item in self.schedule:
            if item["action_epoch"] <= runner.epoch + 1:
                self._apply(runner, item)

    def before_train_epoch(self, runner: "Runner") -> None:
        """Changes the recipe if it is time."""
        for item in self.schedule:
            if item["action_epoch"] == runner.epoch + 1:
                self._apply(runner, item)
                runner.logger.info(f"SwitchRecipeHook: epoch {item['action_epoch']} is trained with {item}")

    @staticmethod
    def _apply(runner: "Runner", item: Mapping[str, Any]) -> None:
        if item["loss"] is not None:
            runner.hyperparams["loss_index"] = item["loss"]
        for name, value in item["hyperparams"].items():
            runner.hyperparams[name] = value


def _checked(item: Mapping[str, Any]) -> dict[str, Any]:
    for name in item:
        if name not in _KEYS:
            raise ConfigError(f"SwitchRecipeHook: a change has no entry {name!r}{closest(name, _KEYS)}")
    epoch = item.get("action_epoch")
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 1:
        raise ConfigError(f"SwitchRecipeHook: action_epoch is an integer of at least 1, found {epoch!r}")
    return dict(action_epoch=epoch, loss=item.get("loss"), hyperparams=dict(item.get("hyperparams") or {}))
