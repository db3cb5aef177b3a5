"""Replay schedules: for a resumed run whose config has changed, and to check all values of a run before it starts."""

from collections.abc import Sequence

from jengine.optim.schedules.plateau import PlateauScheduler
from jengine.optim.schedules.rule_scheduler import RuleScheduler
from jengine.optim.schedules.scheduler import ParamScheduler, Schedulers, flatten_schedulers
from jengine.registry import is_built_in

_MAX_CHECKED = 100_000  # values that are computed before training; those of longer runs are checked when they are set


def check_values(schedulers: Schedulers, *, iters: int | None, epochs: int | None, epoch_length: int | None) -> None:
    """Compute the values of a run, so that an illegal one is an error before training. The schedules do not change.

    The first values are checked if there are many, and none if a class of the user's, which may do anything in a step,
    is among the schedules.

    Args:
      schedulers: the built schedulers; those that were stepped already are not checked.
      iters: iterations of the run; None if unknown, which leaves the schedules over iterations unchecked.
      epochs: epochs of the run; None if unknown.
      epoch_length: iterations in an epoch; None if unknown.

    Raises:
      ConfigError: a value outside the range of its hyperparameter.
    """
    chain = flatten_schedulers(schedulers)
    kinds = RuleScheduler | PlateauScheduler
    if not chain or any(not isinstance(s, kinds) or not is_built_in(type(s)) or s.last_step > 0 for s in chain):
        return
    limit = min(_MAX_CHECKED // max(1, sum(s.num_groups for s in chain)), *(s.settings.max_checked() for s in chain))
    iters = 0 if iters is None or all(s.by_epoch for s in chain) else min(iters, limit)
    epochs = min(epochs or 0, limit, *([iters // epoch_length] if iters and epoch_length else []))
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

    Repeats all steps from the initial values in the order of a training run, including the recorded reductions of
    plateau schedules.

    Args:
      schedulers: the built schedulers.
      iters: completed iterations.
      epochs: completed epochs.
      epoch_length: iterations in an epoch; if unknown, all iterations come before all epochs.
      converted_iters: completed iterations for schedules that are converted from epochs, if they differ from `iters`
        because an epoch had another length before.
    """
    chain = flatten_schedulers(schedulers)
    converted_iters = iters if converted_iters is None else converted_iters
    counts = {s: iters if s.epoch_length is None else converted_iters for s in chain if not s.by_epoch}
    by_epoch = [scheduler for scheduler in chain if scheduler.by_epoch]
    for scheduler in chain:
        scheduler.rewind()
    for scheduler in chain:
        scheduler.step()
    _repeat_reductions(by_epoch, 0)
    epochs_done = 0
    for iteration in range(1, max(iters, converted_iters) + 1):
        for scheduler, count in counts.items():
            if iteration <= count:
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
