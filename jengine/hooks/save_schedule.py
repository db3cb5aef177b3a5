"""When CheckpointHook saves: after a time, or as a policy of Orbax decides.

And which checkpoints a policy keeps.
"""

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jengine.config.duration import parse_duration
from jengine.config.errors import ConfigError
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.parallel.processes import ProcessGroup


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """What the policies know about a checkpoint: Orbax's `PolicyCheckpointInfo`.

    Attributes:
      step: completed iterations.
      time: the start of the save.
      metrics: those of the validation after the same iteration; None without one.
    """

    step: int
    time: datetime.datetime = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC)
    )
    metrics: dict[str, float] | None = None


@runtime_checkable
class SavePolicy(Protocol):
    """Orbax's `SaveDecisionPolicy`."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Return whether to save after `step`."""


@runtime_checkable
class KeepPolicy(Protocol):
    """Orbax's `PreservationPolicy`."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Return for each checkpoint whether to keep it."""


class TimedSaves:
    """Saves after each `seconds`.

    The clocks of several processes differ, so process 0 decides. It tells the others so only at a
    few steps, which are known ahead: each time the next one is where half of the time that is left
    should have passed.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since = 0.0
        self._asked = (0.0, 0)  # when, and at which step
        self._next = 0  # step at which process 0 is asked

    def start(self, runner: RunnerProtocol, step: int) -> None:
        """Begin to count the time: the run begins or continues at `step`, or the step before it
        was saved.
        """
        self._since = self._clock()
        self._asked = (self._since, step)
        self._next = step

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return `step` if the time is over.

        With several processes, the next step at which process 0 is asked.
        """
        if runner.processes.count > 1:
            return max(step, self._next)
        return step if self._remaining() <= 0 else math.inf

    def is_due(self, runner: RunnerProtocol, step: int, previous: Sequence[CheckpointInfo]) -> bool:
        """Return whether the time is over, by the clock of process 0."""
        remaining = self._remaining()
        if runner.processes.count == 1:
            return remaining <= 0
        if step < self._next:  # the hook acts for another reason
            return False
        now = self._clock()
        (last, last_step) = self._asked
        steps_left = remaining * max(step - last_step, 1) / max(now - last, 1e-6)
        is_over, ahead = runner.processes.broadcast(
            "time of a save", (remaining <= 0, max(1, int(steps_left / 2)))
        )
        self._asked = (now, step)
        self._next = step + ahead
        return bool(is_over)

    def _remaining(self) -> float:
        return self._since + self._seconds - self._clock()


class PolicySaves:
    """Saves as a policy of Orbax decides after each iteration."""

    def __init__(self, policy: SavePolicy) -> None:
        from orbax.checkpoint.checkpoint_managers import FixedIntervalPolicy, SpecificStepsPolicy

        self._policy = policy
        # These look at nothing but the step, so that they can be asked ahead
        self._is_by_step = all(
            isinstance(p, FixedIntervalPolicy | SpecificStepsPolicy) for p in _list_parts(policy)
        )

    def start(self, runner: RunnerProtocol, step: int) -> None:
        """Raise ConfigError for a policy that would have all processes wait for each other after
        each iteration.
        """
        from orbax.checkpoint.checkpoint_managers import ContinuousCheckpointingPolicy

        waits = any(
            isinstance(policy, ContinuousCheckpointingPolicy)
            for policy in _list_parts(self._policy)
        )
        if runner.processes.count > 1 and waits:
            raise ConfigError(
                "`CheckpointHook.save_policy` must not be ContinuousCheckpointingPolicy with "
                "several processes, which asks process 0 after each iteration; interval='15m' "
                "asks it a few times between two saves"
            )

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the next step that the policy saves, as far as a chunk reaches.

        Else each, if only it can tell.
        """
        if not self._is_by_step:
            return step
        chunk = range(step, step + runner.train_loop.steps_per_call)
        return next((later for later in chunk if self.is_due(runner, later, ())), chunk.stop)

    def is_due(self, runner: RunnerProtocol, step: int, previous: Sequence[CheckpointInfo]) -> bool:
        """Return what the policy decides after `step`; `previous` are the kept checkpoints.

        It sees no preemption: after a signal the run is saved in any case.
        """
        import orbax.checkpoint as ocp
        from orbax.checkpoint.checkpoint_managers import DecisionContext

        context = DecisionContext(
            is_saving_in_progress=runner.checkpointer.is_saving,
            reached_preemption=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(),
        )
        return bool(self._policy.should_save(CheckpointInfo(step + 1), previous, context=context))


def _list_parts(policy: SavePolicy) -> list[SavePolicy]:
    """Return the policies in an AnySavePolicy, nested ones too.

    A list with the policy if it is another.
    """
    from orbax.checkpoint.checkpoint_managers import AnySavePolicy

    return (
        [x for part in policy.policies for x in _list_parts(part)]
        if isinstance(policy, AnySavePolicy)
        else [policy]
    )


def make_schedule(
    interval: int | str, save_policy: SavePolicy | None
) -> TimedSaves | PolicySaves | None:
    """Return when to save, by steps that count from 0.

    None for a number of epochs or iterations.
    """
    if isinstance(interval, str):
        return TimedSaves(parse_duration(interval))
    return None if save_policy is None else PolicySaves(save_policy)


def check_policies(
    schedule: SavePolicy | str | None, preservation_policy: KeepPolicy | None, **counts: int
) -> None:
    """Raise ConfigError for arguments of CheckpointHook that a policy or a time replaces.

    Policies and times decide at any iteration, while `counts` count epochs or iterations.

    Args:
      schedule: what decides when to save instead of `interval`: a policy or a duration.
      preservation_policy: what decides which to keep instead of `max_keep_ckpts`.
      **counts: `interval`, `save_begin`, `keep_period` and `max_keep_ckpts`.
    """
    replaced = [] if schedule is None else ["interval", "save_begin", "keep_period"]
    replaced += [] if preservation_policy is None else ["max_keep_ckpts"]
    for name in replaced:
        default = 0 if name == "save_begin" else -1
        if counts[name] != default:
            policy = preservation_policy if name == "max_keep_ckpts" else schedule
            other = repr(policy) if isinstance(policy, str) else type(policy).__name__
            raise ConfigError(
                f"CheckpointHook: {name} must be left out with {other}, got {counts[name]!r}; "
                "AnySavePolicy([...]) and AnyPreservationPolicy([...]) combine Orbax's policies"
            )


class SaveHistory:
    """What the policies see of the regular checkpoints, by number (epoch or iteration), oldest save
    first.

    >>> from orbax.checkpoint.checkpoint_managers import EveryNSteps
    >>> from jengine.parallel.processes import SingleProcess
    >>> history = SaveHistory(EveryNSteps(20))
    >>> for epoch in (1, 2, 3):
    ...     history.add(epoch, 10 * epoch)
    >>> history.select_kept([1, 2, 3], SingleProcess())
    [2, 3]

    Args:
      policy: decides which to keep; None keeps all.
    """

    def __init__(self, policy: KeepPolicy | None) -> None:
        self._policy = policy
        self._infos: dict[int, CheckpointInfo] = {}

    @property
    def infos(self) -> list[CheckpointInfo]:
        """The checkpoints."""
        return list(self._infos.values())

    def add(self, number: int, step: int) -> None:
        """Add a checkpoint that is saved now; one with the same number is replaced."""
        self._infos.pop(number, None)
        self._infos[number] = CheckpointInfo(step)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a validation to the checkpoint of the same iteration."""
        for number, info in self._infos.items():
            if info.step == step and self._policy is not None:
                self._infos[number] = dataclasses.replace(
                    info, metrics={**(info.metrics or {}), **metrics}
                )

    def forget_all_but(self, numbers: Sequence[int]) -> None:
        """Forget the checkpoints that are removed."""
        self._infos = {number: self._infos[number] for number in numbers if number in self._infos}

    def select_kept(self, numbers: Sequence[int], processes: ProcessGroup) -> list[int]:
        """Return the numbers to keep: the newest, those of which nothing is known, and those
        that the policy keeps.
        """
        kept = [True] * len(self._infos)
        # policies read the clock, so process 0 decides for all
        if processes.index == 0 and self._policy is not None:
            from orbax.checkpoint.checkpoint_managers import PreservationContext

            kept = [
                bool(flag)
                for flag in self._policy.should_preserve(self.infos, context=PreservationContext())
            ]
        flags = dict(
            zip(self._infos, processes.broadcast("the checkpoints to keep", kept), strict=True)
        )
        return [number for number in numbers if number == numbers[-1] or flags.get(number, True)]

    def state_list(self) -> list[Any]:
        """Return what `load_state_list` restores."""
        return [
            [number, info.step, info.time.timestamp(), info.metrics]
            for number, info in self._infos.items()
        ]

    def load_state_list(self, state: Iterable[Sequence[Any]]) -> None:
        """Restore a result of `state_list`."""
        self._infos = {
            int(number): CheckpointInfo(
                int(step), datetime.datetime.fromtimestamp(seconds, datetime.UTC), metrics
            )
            for number, step, seconds, metrics in state
        }
