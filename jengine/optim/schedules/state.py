"""Save and load the schedules of a run.

`schedulers` are the built ones, `state` is a result of `schedulers_state_dict`.
"""

import itertools
from typing import Any, TypeAlias

from jengine.optim.schedules.scheduler import Schedulers

# the states of the schedulers of one optimizer, or of several by name
SchedulersState: TypeAlias = list[dict[str, Any]] | dict[str, list[dict[str, Any]]]


def schedulers_state_dict(schedulers: Schedulers) -> SchedulersState:
    """Return the scheduler states in the same structure, as JSON-serializable values."""
    if isinstance(schedulers, dict):
        return {name: [s.state_dict() for s in chain] for name, chain in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]


def load_schedulers_state_dict(
    schedulers: Schedulers, state: SchedulersState, *, iters: int = 0, epochs: int = 0
) -> None:
    """Continue at the position of a checkpoint, and set the values that the schedules give there.

    Args:
      schedulers, state: see above. The settings are those of `schedulers`.
      iters, epochs: the position of a scheduler that counts what none in `state` has counted.
    """
    chains = dict(schedulers) if isinstance(schedulers, dict) else {"": schedulers}
    saved_chains = dict(state) if isinstance(state, dict) else {"": state}
    for name, chain in chains.items():
        states = saved_chains.get(name, [])
        counts = {False: iters, True: epochs}
        counts |= {saved["by_epoch"]: saved["global_step"] for saved in states}
        for scheduler, saved in itertools.zip_longest(chain, states[: len(chain)]):
            # It may be another scheduler, which counts or observes something else.
            is_same = saved and saved["by_epoch"] == scheduler.by_epoch
            if is_same and ("plateau" in saved) == scheduler.need_val_args:
                scheduler.restore(saved)
            else:
                scheduler.seek(counts[scheduler.by_epoch])
        for scheduler in chain[:1]:
            scheduler.chain.load_state_dict(
                event for saved in states for event in saved.get("events", ())
            )
            scheduler.chain.refresh()
