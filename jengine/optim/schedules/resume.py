"""The state of all schedulers of a run: saved, loaded, and replayed when the config has changed in between."""

from collections.abc import Sequence
from typing import Any

from jengine.errors import ConfigError, closest, config_path
from jengine.optim.schedules.build import Schedulers, flatten_schedulers
from jengine.optim.schedules.from_optax import is_function
from jengine.optim.schedules.plateau import PlateauScheduler
from jengine.optim.schedules.scheduler import ParamScheduler

_CHOICES = ("checkpoint", "config")


def schedulers_state_dict(schedulers: Schedulers) -> Any:
    """The states of `schedulers`, in the same structure. Fits JSON."""
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
    """Goes on with the schedules of a checkpoint. Load the state of the optimizer wrapper before: it has the values.

    Args:
      schedulers: the built schedulers.
      state: what `schedulers_state_dict` gave.
      settings: whose settings hold where the two differ. With 'checkpoint' the schedule goes on as it was. With
        'config' every value becomes what the settings in the config would have made it by now (see `replay`).
      iters: iterations that are done; for 'config' alone, as the two below.
      epochs: epochs that are done.
      epoch_length: iterations in an epoch.

    Returns:
      One line for each setting in which config and checkpoint differ, empty if they agree.

    Raises:
      ValueError: an unknown choice, or with 'checkpoint' another number or other types of schedulers.
    """
    if settings not in _CHOICES:
        raise ConfigError(f"no choice is called {settings!r}{closest(settings, _CHOICES)}")
    with config_path("param_scheduler"):
        if isinstance(schedulers, dict) != isinstance(state, dict) or (
            isinstance(schedulers, dict) and set(schedulers) != set(state)
        ):
            raise ConfigError(
                f"the checkpoint has schedulers for {_owners(state)}, the config for {_owners(schedulers)}"
            )
        if isinstance(schedulers, dict):
            differences = []
            for name, chain in schedulers.items():
                with config_path(name):
                    differences += _load_chain(chain, state[name], settings, f"param_scheduler.{name}")
        else:
            differences = _load_chain(schedulers, state, settings, "param_scheduler")
    if settings == "config":
        replay(schedulers, iters=iters, epochs=epochs, epoch_length=epoch_length)
    return differences


def replay(schedulers: Schedulers, *, iters: int, epochs: int = 0, epoch_length: int | None = None) -> None:
    """Brings every value to where the settings of `schedulers` have it after so many iterations and epochs.

    It goes from the initial values through all steps in the order of a training run, and repeats the reductions that a
    schedule on a plateau has recorded.

    Args:
      schedulers: the built schedulers.
      iters: iterations that are done.
      epochs: epochs that are done.
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
    done = 0
    for iteration in range(1, iters + 1):
        for scheduler in by_iter:
            scheduler.step()
        if epoch_length is not None and iteration % epoch_length == 0 and done < epochs:
            done += 1
            _step_epoch(by_epoch, done)
    for epoch in range(done + 1, epochs + 1):
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
        message = f"{prefix}: the config has {len(chain)} schedulers, the checkpoint {len(states)}"
        if settings == "checkpoint":
            raise ConfigError(f"{message}; load with settings='config' to go by the config")
        return [message]
    differences = []
    for index, (scheduler, state) in enumerate(zip(chain, states, strict=True)):
        with config_path(index):
            configured, saved = scheduler.state_dict()["settings"], state["settings"]
            for key in sorted(configured.keys() | saved.keys()):
                if configured.get(key) != saved.get(key):
                    here, there = configured.get(key), saved.get(key)
                    differences.append(f"{prefix}[{index}].{key}: {here} in the config, {there} in the checkpoint")
                    if settings == "checkpoint" and key == "schedule" and is_function(there):
                        differences[-1] += " (a function cannot be loaded: the config's applies)"
            if settings == "checkpoint" or configured["type"] == saved["type"]:
                scheduler.load_state_dict(state, settings)
    return differences


def _owners(schedulers: Any) -> str:
    return f"the optimizers {sorted(schedulers)}" if isinstance(schedulers, dict) else "one optimizer"
