"""Save and load the state of all schedulers of a run, and replay the schedules of a changed config."""

from collections.abc import Sequence
from typing import Any

from jengine.errors import ConfigError, closest, config_path
from jengine.optim.schedules.build import Schedulers, flatten_schedulers
from jengine.optim.schedules.from_optax import is_function
from jengine.optim.schedules.plateau import PlateauScheduler
from jengine.optim.schedules.scheduler import ParamScheduler

_CHOICES = ("checkpoint", "config")


def schedulers_state_dict(schedulers: Schedulers) -> Any:
    """Return the states of `schedulers` in the same structure, as JSON-serializable values."""
    if isinstance(schedulers, dict):
        return {name: [scheduler.state_dict() for scheduler in group] for name, group in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]


def load_schedulers_state_dict(
    schedulers: Schedulers,
    state: Any,
    *,
    settings: str = "checkpoint",
    iters: int = 0,
    epochs: int = 0,
    epoch_length: int | None = None,
) -> list[str]:
    """Continue the schedules of a checkpoint. First load the state of the optimizer wrapper, which holds the values.

    Args:
      schedulers: the built schedulers.
      state: the result of `schedulers_state_dict`.
      settings: which settings to use if config and checkpoint differ. 'checkpoint' continues the saved schedule.
        'config' sets every value that the settings in the config give by now (see `replay_schedulers`).
      iters: completed iterations; used with 'config' only, as the next two arguments.
      epochs: completed epochs.
      epoch_length: iterations in an epoch.

    Returns:
      One line for each setting in which config and checkpoint differ, empty if they agree.

    Raises:
      ConfigError: an unknown choice; with 'checkpoint', another number or other types of schedulers.
    """
    if settings not in _CHOICES:
        raise ConfigError(f"`settings` must be 'checkpoint' or 'config', got {settings!r}{closest(settings, _CHOICES)}")
    with config_path("param_scheduler"):
        if isinstance(schedulers, dict) != isinstance(state, dict) or (
            isinstance(schedulers, dict) and set(schedulers) != set(state)
        ):
            raise ConfigError(
                f"the schedulers of the checkpoint must be for {_owners(schedulers)} as in the config, got schedulers "
                f"for {_owners(state)}"
            )
        if isinstance(schedulers, dict):
            differences = []
            for name, chain in schedulers.items():
                with config_path(name):
                    differences += _load_chain(chain, state[name], settings, f"param_scheduler.{name}")
        else:
            differences = _load_chain(schedulers, state, settings, "param_scheduler")
    if settings == "config":
        replay_schedulers(schedulers, iters=iters, epochs=epochs, epoch_length=epoch_length)
    return differences


def replay_schedulers(schedulers: Schedulers, *, iters: int, epochs: int = 0, epoch_length: int | None = None) -> None:
    """Set every value that the settings of `schedulers` give after `iters` iterations and `epochs` epochs.

    Repeats all steps from the initial values in the order of a training run, including the recorded reductions of
    plateau schedules.

    Args:
      schedulers: the built schedulers.
      iters: completed iterations.
      epochs: completed epochs.
      epoch_length: iterations in an epoch; if unknown, all iterations come before all epochs.
    """
    chain = flatten_schedulers(schedulers)
    by_iter = [scheduler for scheduler in chain if not scheduler.by_epoch]
    by_epoch = [scheduler for scheduler in chain if scheduler.by_epoch]
    for scheduler in chain:
        scheduler.rewind()
    for scheduler in chain:
        scheduler.step()
    _repeat_reductions(by_epoch, 0)
    epochs_done = 0
    for iteration in range(1, iters + 1):
        for scheduler in by_iter:
            scheduler.step()
        if epoch_length is not None and iteration % epoch_length == 0 and epochs_done < epochs:
            epochs_done += 1
            _step_epoch(by_epoch, epochs_done)
    for epoch in range(epochs_done + 1, epochs + 1):
        _step_epoch(by_epoch, epoch)


def _step_epoch(schedulers: Sequence[ParamScheduler], epoch: int) -> None:
    for scheduler in schedulers:
        scheduler.step()
    _repeat_reductions(schedulers, epoch)


def _repeat_reductions(schedulers: Sequence[ParamScheduler], epoch: int) -> None:
    for scheduler in schedulers:
        if isinstance(scheduler, PlateauScheduler):
            for _ in range(scheduler.reductions.count(epoch)):
                scheduler.reduce()


def _load_chain(chain: list[ParamScheduler], states: list[Any], settings: str, prefix: str) -> list[str]:
    if len(chain) != len(states):
        if settings == "checkpoint":
            raise ConfigError(
                f"`{prefix}` must have the {len(states)} schedulers of the checkpoint, got {len(chain)}; load with "
                "settings='config' to use those of the config"
            )
        return [f"{prefix}: {len(chain)} schedulers in the config, {len(states)} in the checkpoint"]
    differences = []
    for index, (scheduler, state) in enumerate(zip(chain, states, strict=True)):
        with config_path(index):
            configured, saved = scheduler.state_dict()["settings"], state["settings"]
            for key in sorted(configured.keys() | saved.keys()):
                if configured.get(key) != saved.get(key):
                    new, old = configured.get(key), saved.get(key)
                    line = f"{prefix}[{index}].{key}: {new} in the config, {old} in the checkpoint"
                    if settings == "checkpoint" and key == "schedule" and is_function(old):
                        line += " (a function cannot be loaded: the config's applies)"
                    differences.append(line)
            if settings == "checkpoint" or configured["type"] == saved["type"]:
                scheduler.load_state_dict(state, settings)
    return differences


def _owners(schedulers: Any) -> str:
    return f"the optimizers {sorted(schedulers)}" if isinstance(schedulers, dict) else "one optimizer"
