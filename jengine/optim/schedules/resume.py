"""Save and load the state of all schedulers of a run."""

from typing import Any

from jengine.errors import ConfigError, closest, config_path
from jengine.optim.schedules.from_optax import is_function
from jengine.optim.schedules.scheduler import ParamScheduler, Schedulers, flatten_schedulers

_CHOICES = ("checkpoint", "config")


def schedulers_state_dict(schedulers: Schedulers) -> Any:
    """Return the states of `schedulers` in the same structure, as JSON-serializable values."""
    if isinstance(schedulers, dict):
        return {name: [scheduler.state_dict() for scheduler in group] for name, group in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]


def compare_schedulers(schedulers: Schedulers, state: Any) -> list[str]:
    """Compare the schedules of a config with those of a checkpoint, without loading them.

    The end of a schedule without `end` is not compared: it is that of the run. Neither are initial values, which belong
    to the optimizer.

    Args:
      schedulers: the built schedulers.
      state: the result of `schedulers_state_dict`.

    Returns:
      One line for each setting in which config and checkpoint differ, empty if they agree.

    Raises:
      ConfigError: the checkpoint has schedulers for other optimizers.
    """
    differences = []
    for path, chain, states in _pair_chains(schedulers, state):
        if len(chain) != len(states):
            differences.append(f"{path}: {len(chain)} schedulers in the config, {len(states)} in the checkpoint")
            continue
        for index, (scheduler, saved) in enumerate(zip(chain, states, strict=True)):
            differences += [f"{path}[{index}].{line}" for line in _compare(scheduler, saved)]
    return differences


def list_moved_ends(schedulers: Schedulers, state: Any) -> list[str]:
    """Return one line for each schedule without `end` whose end moves, because the run has another length.

    Args:
      schedulers: the built schedulers.
      state: the result of `schedulers_state_dict`.
    """
    lines = []
    for path, chain, states in _pair_chains(schedulers, state):
        for index, (scheduler, saved) in enumerate(zip(chain, states, strict=False)):
            end = saved["settings"]["end"]
            if scheduler.keeps_end(saved) and not scheduler.has_other_epochs(saved) and scheduler.end != end:
                unit = "epochs" if scheduler.by_epoch else "iterations"
                lines.append(f"{path}[{index}]: after {scheduler.end:g} {unit}, {end:g} in the checkpoint")
    return lines


def load_schedulers_state_dict(schedulers: Schedulers, state: Any, *, settings: str = "checkpoint") -> bool:
    """Load the counters of a checkpoint, and its settings. First load the state of the optimizer wrapper.

    Args:
      schedulers: the built schedulers.
      state: the result of `schedulers_state_dict`.
      settings: which settings to use if config and checkpoint differ: 'checkpoint' or 'config'. A schedule without
        `end`, here and in the checkpoint, ends with this run.

    Returns:
      True if the schedules are now other ones than those of the checkpoint: then call `replay_schedulers`, which sets
      the values that they give by now.

    Raises:
      ConfigError: an unknown choice; with 'checkpoint', as `check_scheduler_types`.
    """
    if settings not in _CHOICES:
        raise ConfigError(f"`settings` must be 'checkpoint' or 'config', got {settings!r}{closest(settings, _CHOICES)}")
    is_changed = settings == "config" and bool(compare_schedulers(schedulers, state))
    settings = "config" if is_changed else "checkpoint"
    if settings == "checkpoint":
        check_scheduler_types(schedulers, state)
    for path, chain, states in _pair_chains(schedulers, state):
        with config_path(path):
            is_changed |= _load_chain(chain, states, settings)
    return is_changed


def check_scheduler_types(schedulers: Schedulers, state: Any) -> None:
    """Check that the settings of a checkpoint can be loaded into the schedulers of a config.

    Args:
      schedulers: the built schedulers.
      state: the result of `schedulers_state_dict`.

    Raises:
      ConfigError: another number or other types of schedulers.
    """
    for path, chain, states in _pair_chains(schedulers, state):
        if len(chain) != len(states):
            raise ConfigError(
                f"`{path}` must have the {len(states)} schedulers of the checkpoint, got {len(chain)}; to use those of "
                "the config, set resume_policy.schedules='config'"
            )
        for index, (scheduler, saved) in enumerate(zip(chain, states, strict=True)):
            with config_path(path, index):
                scheduler.check_type(saved)


def reset_initial_values(schedulers: Schedulers) -> None:
    """Record the current values of the groups as the initial ones, from which `replay_schedulers` starts."""
    for scheduler in flatten_schedulers(schedulers):
        scheduler.reset_initial_values()


def _pair_chains(schedulers: Schedulers, state: Any) -> list[tuple[str, list[ParamScheduler], list[Any]]]:
    """Return the config path, the schedulers and the saved states of each optimizer."""
    if isinstance(schedulers, dict) != isinstance(state, dict) or (
        isinstance(schedulers, dict) and set(schedulers) != set(state)
    ):
        with config_path("param_scheduler"):
            raise ConfigError(
                f"the schedulers of the checkpoint must be for {_owners(schedulers)} as in the config, got schedulers "
                f"for {_owners(state)}"
            )
    if isinstance(schedulers, dict):
        return [(f"param_scheduler.{name}", chain, state[name]) for name, chain in schedulers.items()]
    return [("param_scheduler", schedulers, state)]


def _compare(scheduler: ParamScheduler, state: dict[str, Any]) -> list[str]:
    own = scheduler.state_dict()["settings"]
    saved = state["settings"]
    skipped = {"base_values", "end"} if scheduler.keeps_end(state) else {"base_values"}
    if scheduler.has_other_epochs(state):  # its settings are in iterations, of which an epoch has another number
        skipped |= {"begin", "end", *(scheduler.family.epoch_units or ())}
    differences = []
    for key in sorted((own.keys() | saved.keys()) - skipped):
        if own.get(key) != saved.get(key):
            line = f"{key}: {own.get(key)} in the config, {saved.get(key)} in the checkpoint"
            if key == "schedule" and is_function(saved.get(key)):
                line += " (a function cannot be loaded: the config's applies)"
            differences.append(line)
    return differences


def _load_chain(chain: list[ParamScheduler], states: list[Any], settings: str) -> bool:
    """Load the states; return whether the end of a schedule has moved with that of the run."""
    if len(chain) != len(states):
        return False
    has_moved = False
    for index, (scheduler, state) in enumerate(zip(chain, states, strict=True)):
        with config_path(index):
            if settings == "checkpoint" or scheduler.state_dict()["settings"]["type"] == state["settings"]["type"]:
                scheduler.load_state_dict(state, settings)
        has_moved |= scheduler.keeps_end(state) and scheduler.end != state["settings"]["end"]
        has_moved |= scheduler.has_other_epochs(state)
    return has_moved


def _owners(schedulers: Any) -> str:
    return f"the optimizers {sorted(schedulers)}" if isinstance(schedulers, dict) else "one optimizer"
