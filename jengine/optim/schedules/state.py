"""Save and load the schedules of a run.

`schedulers` are the built ones, `state` is a result of `schedulers_state_dict`.
"""

import functools
from typing import Any, Literal, TypeAlias

from jengine.annotations import checked
from jengine.errors import ConfigError, config_path
from jengine.optim.schedules.scheduler import ParamScheduler, Schedulers, flatten_schedulers

# the states of the schedulers of one optimizer, or of several by name
SchedulersState: TypeAlias = list[dict[str, Any]] | dict[str, list[dict[str, Any]]]


def schedulers_state_dict(schedulers: Schedulers) -> SchedulersState:
    """Return the scheduler states in the same structure, as JSON-serializable values."""
    if isinstance(schedulers, dict):
        return {name: [scheduler.state_dict() for scheduler in chain] for name, chain in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]


@functools.partial(checked, owner="")
def load_schedulers_state_dict(
    schedulers: Schedulers,
    state: SchedulersState,
    *,
    settings: Literal["config", "checkpoint"] = "config",
    iters: int = 0,
    epochs: int = 0,
) -> None:
    """Continue at the position of a checkpoint, and set the values that the schedules give there.

    Args:
      schedulers, state: see above.
      settings: whose settings hold: those of `schedulers` ('config'), or those in `state` ('checkpoint'), as in
        MMEngine. A schedule without `end`, here and in the checkpoint, ends with this run.
      iters, epochs: the position of a scheduler that counts what none in `state` has counted.

    Raises:
      ConfigError: an unknown choice; with 'checkpoint', other schedulers than in `state`.
    """
    saved_chains = dict(state) if isinstance(state, dict) else {"": state}
    chains = dict(schedulers) if isinstance(schedulers, dict) else {"": schedulers}
    if settings == "checkpoint":
        _check_types(chains, saved_chains)
    for name, chain in chains.items():
        states = saved_chains.get(name, [])
        counts = {False: iters, True: epochs}
        for saved in states:
            counts[saved["settings"]["by_epoch"]] = saved["global_step"]
        for index, scheduler in enumerate(chain):
            with config_path(*_path(name), index):
                if index < len(states) and scheduler.continues(states[index]):
                    scheduler.load_position(states[index])
                    if settings == "checkpoint":
                        scheduler.load_settings(states[index])
                else:
                    scheduler.seek(counts[scheduler.by_epoch])
        for scheduler in chain:
            scheduler.chain.load_state_dict([event for saved in states for event in saved.get("events", ())])
            scheduler.chain.refresh()
            break  # one chain for all


def seek_schedulers(schedulers: Schedulers | None, iters: int, epochs: int) -> None:
    """Set the values that the schedules give after this many iterations and epochs."""
    for scheduler in (flat := flatten_schedulers(schedulers)):
        scheduler.seek(epochs if scheduler.by_epoch else iters)
    for chain in {id(scheduler.chain): scheduler.chain for scheduler in flat}.values():
        chain.refresh()


def _check_types(chains: dict[str, list[ParamScheduler]], saved_chains: dict[str, list[dict[str, Any]]]) -> None:
    """Raise ConfigError unless the checkpoint has the same number and types of schedulers."""
    if chains.keys() != saved_chains.keys():
        with config_path("param_scheduler"):
            raise ConfigError(
                f"the schedulers of the checkpoint must be for {_owners(chains)} as in the config, got schedulers for "
                f"{_owners(saved_chains)}"
            )
    for name, chain in chains.items():
        if len(chain) != len(saved_chains[name]):
            raise ConfigError(
                f"`{'.'.join(_path(name))}` must have the {len(saved_chains[name])} schedulers of the checkpoint, got "
                f"{len(chain)}"
            )
        for index, (scheduler, saved) in enumerate(zip(chain, saved_chains[name], strict=True)):
            with config_path(*_path(name), index):
                scheduler.check_type(saved)


def _path(name: str) -> tuple[str, ...]:
    return ("param_scheduler", name) if name else ("param_scheduler",)


def _owners(chains: dict[str, Any]) -> str:
    return "one optimizer" if list(chains) == [""] else f"the optimizers {sorted(chains)}"
