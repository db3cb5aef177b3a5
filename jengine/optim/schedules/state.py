"""Save and load the schedules of a run.

`schedulers` are the built ones, `state` is a result of `schedulers_state_dict`.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from jengine.config.annotations import checked
from jengine.config.errors import ConfigError, config_path
from jengine.optim.schedules.scheduler import ParamScheduler, Schedulers, flatten_schedulers

# the states of the schedulers of one optimizer, or of several by name
SchedulersState: TypeAlias = list[dict[str, Any]] | dict[str, list[dict[str, Any]]]


def schedulers_state_dict(schedulers: Schedulers) -> SchedulersState:
    """Return the scheduler states in the same structure, as JSON-serializable values."""
    if isinstance(schedulers, dict):
        return {
            name: [scheduler.state_dict() for scheduler in chain]
            for name, chain in schedulers.items()
        }
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
      settings: whose settings hold: those of `schedulers` ('config'), or those in `state`
        ('checkpoint'), as in MMEngine. A schedule without `end`, here and in the checkpoint, ends
        with this run.
      iters, epochs: the position of a scheduler that counts what none in `state` has counted.

    Raises:
      ConfigError: an unknown choice; with 'checkpoint', other schedulers than in `state`.
    """
    chains = dict(schedulers) if isinstance(schedulers, dict) else {"": schedulers}
    saved_chains = dict(state) if isinstance(state, dict) else {"": state}
    for name in sorted(chains.keys() | saved_chains.keys()):
        chain = chains.get(name, [])
        states = saved_chains.get(name, [])
        with config_path("param_scheduler", *([name] if name else [])):
            if settings == "checkpoint" and len(chain) != len(states):
                raise ConfigError(
                    f"`param_scheduler` must have the {len(states)} schedulers of the checkpoint, "
                    f"got {len(chain)}"
                )
            _load_chain(chain, states, settings == "checkpoint", {False: iters, True: epochs})


def seek_schedulers(schedulers: Schedulers | None, iters: int, epochs: int) -> None:
    """Set the values that the schedules give after this many iterations and epochs."""
    for scheduler in (flat := flatten_schedulers(schedulers)):
        scheduler.seek(epochs if scheduler.by_epoch else iters)
    for chain in {id(scheduler.chain): scheduler.chain for scheduler in flat}.values():
        chain.refresh()


def _load_chain(
    chain: Sequence[ParamScheduler],
    states: Sequence[dict[str, Any]],
    with_settings: bool,
    counts: dict[bool, int],
) -> None:
    counts |= {saved["settings"]["by_epoch"]: saved["global_step"] for saved in states}
    for index, (scheduler, saved) in enumerate(itertools.zip_longest(chain, states[: len(chain)])):
        with config_path(index):
            # In the config's settings it may be another scheduler, which counts or observes
            # something else.
            is_same = saved and saved["settings"]["by_epoch"] == scheduler.by_epoch
            if with_settings or (is_same and ("plateau" in saved) == scheduler.need_val_args):
                scheduler.restore(saved, with_settings=with_settings)
            else:
                scheduler.seek(counts[scheduler.by_epoch])
    for scheduler in chain[:1]:
        scheduler.chain.load_state_dict(
            event for saved in states for event in saved.get("events", ())
        )
        scheduler.chain.refresh()
