"""Which checkpoints are kept, and why: Orbax's preservation policies over what a run has saved.

The policies are asked one by one and not as one `AnyPreservationPolicy`, which would not tell which of them spoke.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple


def keep_regular(numbers: Sequence[int], *, latest: int, every: int = -1, unit: str = "epochs") -> dict[int, str]:
    """Which regular checkpoints stay.

    Args:
      numbers: the epochs or iterations of the checkpoints, oldest save first.
      latest: how many of the newest stay; -1 for all.
      every: multiples of it stay for good; -1 for none.
      unit: what `numbers` counts, for the reasons.

    Returns:
      The number of each that stays, in the same order, with the reason. The newest is always among them.
    """
    if latest == -1:
        return dict.fromkeys(numbers, "all are kept")
    from orbax.checkpoint import checkpoint_managers as managers

    policies: list[tuple[Any, str]] = [(managers.LatestN(n=latest), f"one of the latest {latest}")]
    if every != -1:
        policies.append((managers.EveryNSteps(interval_steps=every), f"every {every} {unit}"))
    saved = [_Saved(step=number) for number in numbers]
    reasons: dict[int, list[str]] = {number: [] for number in numbers}
    for policy, reason in policies:
        for number, stays in zip(numbers, _ask(policy, saved), strict=True):
            if stays:
                reasons[number].append(reason)
    if numbers:
        reasons[numbers[-1]][0] = "the latest"
    return {number: ", ".join(why) for number, why in reasons.items() if why}


def keep_best(scores: Sequence[float], *, count: int, rule: str) -> list[int]:
    """Which of the best checkpoints stay.

    Args:
      scores: one for each checkpoint, no NaN; of equal scores the later in the sequence stays.
      count: how many stay.
      rule: 'greater' or 'less', which score is better.

    Returns:
      The positions in `scores` of those that stay, the best first.
    """
    from orbax.checkpoint import checkpoint_managers as managers

    policy = managers.BestN(get_metric_fn=float, reverse=rule == "less", n=count)
    saved = [_Saved(step=i, metrics=score) for i, score in enumerate(scores)]
    stay = [i for i, stays in enumerate(_ask(policy, saved)) if stays]
    sign = -1 if rule == "greater" else 1
    return sorted(stay, key=lambda i: (sign * scores[i], -i))


class _Saved(NamedTuple):
    """What Orbax's policies look at in a checkpoint."""

    step: int
    metrics: float | None = None
    time: datetime = datetime.fromtimestamp(0, UTC)  # no policy used here asks for it


def _ask(policy: Any, checkpoints: Sequence[_Saved]) -> Sequence[bool]:
    from orbax.checkpoint import checkpoint_managers

    return policy.should_preserve(checkpoints, context=checkpoint_managers.preservation_policy.PreservationContext())
