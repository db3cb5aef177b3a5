"""Save, load, compare and replay the schedulers of a run.

`schedulers` are the built ones, `state` is a result of `schedulers_state_dict`.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from jengine.annotations import checked
from jengine.errors import ConfigError, config_path
from jengine.optim.schedules.from_optax import is_function
from jengine.optim.schedules.plateau import PlateauScheduler
from jengine.optim.schedules.scheduler import ParamScheduler, Schedulers, flatten_schedulers
from jengine.registry import is_built_in

# the states of the schedulers of one optimizer, or of several by name
SchedulersState: TypeAlias = list[dict[str, Any]] | dict[str, list[dict[str, Any]]]

_MAX_CHECKED = 100_000  # values that are computed before training; those of longer runs are checked when they are set


def schedulers_state_dict(schedulers: Schedulers) -> SchedulersState:
    """Return the scheduler states in the same structure, as JSON-serializable values."""
    if isinstance(schedulers, dict):
        return {name: [scheduler.state_dict() for scheduler in chain] for name, chain in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]


def compare_schedulers(schedulers: Schedulers, state: SchedulersState) -> list[str]:
    """Return one line for each setting in which config and checkpoint differ, without loading anything.

    The end of a schedule without `end` is the run's and is not compared. Neither are initial values, which belong to
    the optimizer.

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


def list_moved_ends(schedulers: Schedulers, state: SchedulersState) -> list[str]:
    """Return one line for each schedule without `end` whose end moves, because the run has another length."""
    lines = []
    for path, chain, states in _pair_chains(schedulers, state):
        for index, (scheduler, saved) in enumerate(zip(chain, states, strict=False)):
            end = saved["settings"]["end"]
            if scheduler.keeps_end(saved) and not scheduler.has_other_epochs(saved) and scheduler.end != end:
                unit = "epochs" if scheduler.by_epoch else "iterations"
                lines.append(f"{path}[{index}]: after {scheduler.end:g} {unit}, {end:g} in the checkpoint")
    return lines


@functools.partial(checked, owner="")
def load_schedulers_state_dict(
    schedulers: Schedulers, state: SchedulersState, *, settings: Literal["checkpoint", "config"] = "checkpoint"
) -> bool:
    """Load the counters and settings of a checkpoint. Load the optimizer wrapper's state first.

    Args:
      schedulers, state: see above.
      settings: which settings to use if config and checkpoint differ: 'checkpoint' or 'config'. A schedule without
        `end`, here and in the checkpoint, ends with this run.

    Returns:
      True if the schedules now differ from the checkpoint's: then call `replay_schedulers`, which sets the values that
      they give by now.

    Raises:
      ConfigError: an unknown choice; with 'checkpoint', as `check_scheduler_types`.
    """
    is_changed = settings == "config" and bool(compare_schedulers(schedulers, state))
    if not is_changed:
        # Also for 'config' if nothing differs: the stored values are exact, computing them again may round otherwise.
        settings = "checkpoint"
        check_scheduler_types(schedulers, state)
    for path, chain, states in _pair_chains(schedulers, state):
        for index, (scheduler, saved) in enumerate(
            # Chains of different lengths, with settings='config', have no pairs whose states could be taken over.
            zip(chain, states, strict=True) if len(chain) == len(states) else ()
        ):
            if settings == "checkpoint" or type(scheduler).__name__ == saved["settings"]["type"]:
                with config_path(path, index):
                    scheduler.load_state_dict(saved, settings)
            # A longer or shorter run moves the end, and every value before it with it.
            is_changed |= scheduler.keeps_end(saved) and scheduler.end != saved["settings"]["end"]
            is_changed |= scheduler.has_other_epochs(saved)
    return is_changed


def check_scheduler_types(schedulers: Schedulers, state: SchedulersState) -> None:
    """Raise ConfigError unless the checkpoint has the same number and types of schedulers, which can be loaded."""
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
    """Record the current group values as the initial ones, from which `replay_schedulers` starts."""
    for scheduler in flatten_schedulers(schedulers):
        scheduler.reset_initial_values()


def check_values(schedulers: Schedulers, *, iters: int | None, epochs: int | None, epoch_length: int | None) -> None:
    """Compute the values of a run, so that an illegal one is an error before training. The schedules do not change.

    Only the first values are checked if there are many, and none if one of the schedules is a user's class, whose step
    may do anything.

    Args:
      schedulers: the built schedulers; those that were stepped already are not checked.
      iters: iterations of the run; None if unknown, which leaves the schedules over iterations unchecked.
      epochs: epochs of the run; None if unknown.
      epoch_length: iterations per epoch; None if unknown.

    Raises:
      ConfigError: an illegal value.
    """
    chain = flatten_schedulers(schedulers)
    if not chain or any(not is_built_in(type(s)) or s.last_step > 0 for s in chain):
        return
    limit = min(_MAX_CHECKED // max(1, sum(s.num_groups for s in chain)), *(s.settings.max_checked() for s in chain))
    iters = 0 if iters is None or all(s.by_epoch for s in chain) else min(iters, limit)
    epochs = min(epochs or 0, limit, *([iters // epoch_length] if iters and epoch_length else []))
    # All first: schedulers share groups, and each snapshot must be from before any step.
    restore = [scheduler.snapshot() for scheduler in chain]
    for scheduler in chain:
        scheduler.verbose = False
    replay_schedulers(schedulers, iters=max(iters - 1, 0), epochs=max(epochs - 1, 0), epoch_length=epoch_length)
    for undo in restore:
        undo()


def replay_schedulers(
    schedulers: Schedulers,
    *,
    iters: int,
    epochs: int = 0,
    epoch_length: int | None = None,
    converted_iters: int | None = None,
) -> None:
    """Set every value that the settings of `schedulers` give after `iters` iterations and `epochs` epochs.

    All steps are repeated from the initial values in the order of a training run, including the recorded reductions of
    plateau schedules.

    Args:
      schedulers: the built schedulers.
      iters: completed iterations.
      epochs: completed epochs.
      epoch_length: iterations per epoch; if unknown, all iterations come before all epochs.
      converted_iters: completed iterations for schedules that are converted from epochs, if they differ from `iters`
        because an epoch had another length before.
    """
    chain = flatten_schedulers(schedulers)
    converted_iters = iters if converted_iters is None else converted_iters
    # A converted schedule counts this run's iterations, of which earlier epochs may have had another number.
    counts = {s: iters if s.epoch_length is None else converted_iters for s in chain if not s.by_epoch}
    by_epoch = [scheduler for scheduler in chain if scheduler.by_epoch]

    def step_all(stepped: Sequence[ParamScheduler], epoch: int) -> None:
        for scheduler in stepped:
            scheduler.step()
        for scheduler in by_epoch:
            if isinstance(scheduler, PlateauScheduler):
                for _ in range(scheduler.reductions.count(epoch)):
                    scheduler.reduce()

    for scheduler in chain:
        scheduler.rewind()
    step_all(chain, epoch=0)
    epochs_done = 0
    for iteration in range(1, max(iters, converted_iters) + 1):
        for scheduler, count in counts.items():
            if iteration <= count:
                scheduler.step()
        if epoch_length is not None and iteration % epoch_length == 0 and epochs_done < epochs:
            epochs_done += 1
            step_all(by_epoch, epochs_done)
    for epoch in range(epochs_done + 1, epochs + 1):
        step_all(by_epoch, epoch)


def _pair_chains(schedulers: Schedulers, state: SchedulersState) -> list[tuple[str, list[ParamScheduler], list[Any]]]:
    """Return the config path, the schedulers and the saved states of each optimizer."""
    if isinstance(schedulers, dict) and isinstance(state, dict) and schedulers.keys() == state.keys():
        return [(f"param_scheduler.{name}", chain, state[name]) for name, chain in schedulers.items()]
    if not isinstance(schedulers, dict) and not isinstance(state, dict):
        return [("param_scheduler", schedulers, state)]
    with config_path("param_scheduler"):
        raise ConfigError(
            f"the schedulers of the checkpoint must be for {_owners(schedulers)} as in the config, got schedulers for "
            f"{_owners(state)}"
        )


def _compare(scheduler: ParamScheduler, state: dict[str, Any]) -> list[str]:
    own = scheduler.state_dict()["settings"]
    saved = state["settings"]
    # Initial values are compared with the settings of the optimizer, where they come from.
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


def _owners(schedulers: Schedulers | SchedulersState) -> str:
    return f"the optimizers {sorted(schedulers)}" if isinstance(schedulers, dict) else "one optimizer"
