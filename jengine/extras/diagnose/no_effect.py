"""Warnings, when training starts, about settings without the effect that their names promise."""

import numpy as np

from jengine.hooks.checkpoint import CheckpointHook
from jengine.hooks.ema import EMAHook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.module_types import is_batch_norm
from jengine.optim.schedules.chain import chain_of
from jengine.optim.schedules.formulas import INF
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import wrappers_by_name
from jengine.runner.components import has_own_step
from jengine.train.average import ExponentialMovingAverage

_MAX_ITERS = 10**6  # the schedules of a longer run take seconds
_FIRST = 0.5  # the share of the first weights in an average from which it is mostly these
_END = 0.9  # a schedule that ends in the last tenth of a run means to


def name_without_effect(runner: RunnerProtocol) -> None:
    """Warn of chunks that hooks make single steps, and of traced points that no step calls."""
    run = runner.run
    steps_per_call = runner.train_loop.steps_per_call
    blockers = runner.hook_list.list_chunk_blockers(runner)
    if steps_per_call > 1 and blockers:
        names = ", ".join(type(hook).__name__ for hook in blockers)
        run.logger.warning(
            f"steps_per_call={steps_per_call} has no effect: {names} may act at each step; "
            "iterations run one by one. To allow chunks, set `every` or `acts_on`."
        )
    traced = [type(hook).__name__ for hook in runner.hooks if hook.get_traced_points()]
    if has_own_step(runner) and traced:
        run.logger.warning(
            f"{type(runner).__name__}.train_step replaces the built-in step: the traced points of "
            f"{', '.join(traced)} have no effect unless it calls `super().train_step(batch)`. A "
            "`train_step` of the model runs them."
        )


def name_small_batches(runner: RunnerProtocol) -> None:
    """Warn of batch norms under gradient accumulation."""
    wrapper = runner.optim_wrapper
    norms = [path for path, kind in runner.model.module_types.items() if is_batch_norm(kind)]
    if not (isinstance(wrapper, OptimWrapper) and wrapper.accumulates and norms):
        return
    count = max(wrapper.counts.values)
    runner.run.logger.warning(
        f"Gradients are accumulated over {count} iterations, but BatchNorm "
        f"({norms[0]}{f' and {len(norms) - 1} more' if len(norms) > 1 else ''}) computes its "
        "statistics from each small batch: the result differs from that of the large batch."
    )


def name_long_intervals(runner: RunnerProtocol) -> None:
    """Warn of checkpoint hooks that save nothing: the loop has no epochs, or the run is shorter."""
    for hook in runner.hooks:
        if not isinstance(hook, CheckpointHook) or hook.interval == -1:
            continue
        if hook.by_epoch and not runner.train_loop.by_epoch:
            saved = "only the end" if hook.save_last else "no regular checkpoint"
            runner.run.logger.warning(
                "CheckpointHook counts epochs but the train loop counts iterations: "
                f"{saved} will be saved; set by_epoch=False and an interval in iterations"
            )
            continue
        unit = "epochs" if hook.by_epoch else "iterations"
        end = runner.max_epochs if hook.by_epoch else runner.max_iters
        first = hook.save_begin or hook.interval
        # At the start: that a run of days has saved nothing would be noticed at its end.
        if first > end and not (hook.save_last or hook.saves_best):
            runner.run.logger.warning(
                f"CheckpointHook saves nothing in this run of {end} {unit}: the first checkpoint "
                f"would be after {first}, save_last is False, and there is no save_best."
            )


def name_early_ends(runner: RunnerProtocol) -> None:
    """Warn of learning rates that are 0 in the whole run, or whose decay ends long before it."""
    if runner.max_iters > _MAX_ITERS:
        return
    steps = np.arange(runner.max_iters)
    for wrapper in wrappers_by_name(runner.optim_wrapper).values():
        scheduled = chain_of(wrapper).at(steps)
        largest = np.zeros(len(steps))
        for i, group in enumerate(wrapper.param_groups):
            rates = scheduled.get(i, {}).get("lr", group.get("lr"))
            # an optimizer that chooses its rate has none
            largest = np.maximum(largest, 1.0 if rates is None else rates)
        if not largest.any():
            runner.run.logger.warning(
                "The learning rate is 0 in all iterations, so that no parameter changes: set "
                "`optim_wrapper.optimizer.lr`."
            )
            continue
        changes = np.flatnonzero(np.diff(largest))
        # the first iteration with the final rate
        last = int(changes[-1]) + 1 if changes.size else 0
        if last + 1 < _END * len(steps) and largest[-1] < largest.max() and _has_end(runner, last):
            runner.run.logger.warning(
                f"The learning rate stays at {largest[-1]:.3g} from iteration {last} of "
                f"{runner.max_iters} on, because its decay ends there: set the `end` in "
                "`param_scheduler` to the end of the run, if that is not meant."
            )


def _has_end(runner: RunnerProtocol, step: int) -> bool:
    """Return whether a schedule ends by its setting at a step; milestones are no ends."""
    length = runner.train_loop.epoch_length or 1
    # A schedule by epochs that ends with the run is constant in the last one.
    return any(end - length <= step <= end < runner.max_iters for end, _ in _list_ends(runner))


def _list_ends(runner: RunnerProtocol) -> list[tuple[float, str]]:
    """Return the end of each schedule that has one, in iterations, and its class."""
    schedulers = runner.param_schedulers or []
    lists = schedulers.values() if isinstance(schedulers, dict) else [schedulers]
    length = runner.train_loop.epoch_length or 1
    found = [s for each in lists for s in each if s.end != INF]
    return [(s.end * (length if s.by_epoch else 1), type(s).__name__) for s in found]


def name_late_ends(runner: RunnerProtocol) -> None:
    """Warn of a schedule that the run ends before, as after `--epochs` alone."""
    end, name = max(_list_ends(runner), default=(0, ""))
    if end > runner.max_iters:
        runner.run.logger.warning(
            f"{name} in `param_scheduler` ends at iteration {end:g}, after the run of "
            f"{runner.max_iters}: set its `end` to the end of the run, if that is not meant."
        )


def name_slow_averages(runner: RunnerProtocol) -> None:
    """Warn of averages that are still mostly the first weights at the end, which are evaluated."""
    for hook in runner.hooks:
        if not isinstance(hook, EMAHook) or not hook.evaluate_on_ema:
            continue
        average = hook.average
        if (
            type(average) is not ExponentialMovingAverage
            or max(hook.begin_iter, hook.begin_epoch) > 1
        ):
            continue
        first = (1 - average.momentum) ** (runner.max_iters // average.interval)
        if first > _FIRST:
            runner.run.logger.warning(
                f"The EMAHook's averages, which validations use, are {first:.0%} the first weights "
                f"at the end of {runner.max_iters} iterations: set a `momentum` above "
                f"{average.momentum:g}, such as {_suggest(runner.max_iters, average.interval):.1g}."
            )


def _suggest(iters: float, interval: int) -> float:
    """Return the momentum whose average spans a tenth of the run."""
    return min(10 * interval / iters, 0.5)
