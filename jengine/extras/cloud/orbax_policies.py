"""Orbax's policies in CheckpointHook: when to save, and which regular checkpoints to keep."""

import dataclasses
import datetime
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jengine.config.annotations import checked
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


@functools.partial(checked, owner="CheckpointHook")
class OrbaxPolicies:
    """Policies, and what they see of the regular checkpoints, by number (epoch or iteration),
    oldest save first.

    >>> from orbax.checkpoint.checkpoint_managers import EveryNSteps
    >>> from jengine.parallel.processes import SingleProcess
    >>> policies = OrbaxPolicies(None, EveryNSteps(20))
    >>> for epoch in (1, 2, 3):
    ...     policies.add(epoch, 10 * epoch)
    >>> policies.select_kept([1, 2, 3], SingleProcess())
    [2, 3]

    Args:
      save_policy: decides after which iterations to save; None if something else does.
      preservation_policy: decides which checkpoints to keep; None keeps all.
    """

    def __init__(
        self, save_policy: SavePolicy | None, preservation_policy: KeepPolicy | None
    ) -> None:
        from orbax.checkpoint.checkpoint_managers import FixedIntervalPolicy, SpecificStepsPolicy

        self._save = save_policy
        self._keep = preservation_policy
        self._infos: dict[int, CheckpointInfo] = {}
        # These look at nothing but the step, so that they can be asked ahead
        self._is_by_step = all(
            isinstance(policy, FixedIntervalPolicy | SpecificStepsPolicy)
            for policy in _list_parts(save_policy)
        )

    # --- When to save ---

    def start(self, runner: RunnerProtocol, step: int) -> None:
        """Raise ConfigError for a policy that would have all processes wait for each other after
        each iteration.
        """
        from orbax.checkpoint.checkpoint_managers import ContinuousCheckpointingPolicy

        waits = any(
            isinstance(policy, ContinuousCheckpointingPolicy) for policy in _list_parts(self._save)
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
        return next((later for later in chunk if self._decide(runner, later, ())), chunk.stop)

    def is_due(self, runner: RunnerProtocol, step: int) -> bool:
        """Return what the policy decides after `step`.

        It sees no preemption: after a signal the run is saved in any case.
        """
        return self._decide(runner, step, list(self._infos.values()))

    def _decide(
        self, runner: RunnerProtocol, step: int, previous: Sequence[CheckpointInfo]
    ) -> bool:
        import orbax.checkpoint as ocp
        from orbax.checkpoint.checkpoint_managers import DecisionContext

        assert self._save is not None
        context = DecisionContext(
            is_saving_in_progress=runner.checkpointer.is_saving,
            reached_preemption=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(),
        )
        return bool(self._save.should_save(CheckpointInfo(step + 1), previous, context=context))

    # --- What to keep ---

    def add(self, number: int, step: int) -> None:
        """Add a checkpoint that is saved now; one with the same number is replaced."""
        self._infos.pop(number, None)
        self._infos[number] = CheckpointInfo(step)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a validation to the checkpoint of the same iteration."""
        for number, info in self._infos.items():
            if info.step == step:
                merged = {**(info.metrics or {}), **metrics}
                self._infos[number] = dataclasses.replace(info, metrics=merged)

    def forget_all_but(self, numbers: Sequence[int]) -> None:
        """Forget the checkpoints that are removed."""
        self._infos = {number: self._infos[number] for number in numbers if number in self._infos}

    def select_kept(self, numbers: Sequence[int], processes: ProcessGroup) -> list[int]:
        """Return the numbers to keep: the newest, those of which nothing is known, and those
        that the policy keeps.
        """
        from orbax.checkpoint.checkpoint_managers import PreservationContext

        flags = [True] * len(self._infos)
        # policies read the clock, so process 0 decides for all
        if processes.index == 0 and self._keep is not None:
            infos = list(self._infos.values())
            kept = self._keep.should_preserve(infos, context=PreservationContext())
            flags = list(map(bool, kept))
        flags = processes.broadcast("the checkpoints to keep", flags)
        dropped = {n for n, is_kept in zip(self._infos, flags, strict=True) if not is_kept}
        return [n for n in numbers if n == numbers[-1] or n not in dropped]

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


def _list_parts(policy: SavePolicy | None) -> list[SavePolicy | None]:
    """Return the policies in an AnySavePolicy, nested ones too.

    A list with the policy if it is another.
    """
    from orbax.checkpoint.checkpoint_managers import AnySavePolicy

    return (
        [x for part in policy.policies for x in _list_parts(part)]
        if isinstance(policy, AnySavePolicy)
        else [policy]
    )
