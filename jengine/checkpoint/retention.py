"""Select the checkpoints to keep: by interval, by recency and by the best value of a metric."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jengine.errors import UnknownNameError, closest

GREATER_KEYS = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
LESS_KEYS = ("loss",)
RULES = ("greater", "less")


def keep_regular(numbers: Sequence[int], *, latest: int, every: int = -1, unit: str = "epochs") -> dict[int, str]:
    """Select the regular checkpoints to keep.

    Args:
      numbers: the epochs or iterations of the checkpoints, oldest save first.
      latest: how many of the newest to keep; -1 for all.
      every: keep multiples of this number for good; -1 for none.
      unit: the unit of `numbers`, for the reasons.

    Returns:
      The numbers to keep, in the same order, with the reasons. The newest is always among them.
    """
    if latest == -1:
        return dict.fromkeys(numbers, "all are kept")
    from orbax.checkpoint import checkpoint_managers as managers

    policies: list[tuple[Any, str]] = [(managers.LatestN(n=latest), f"one of the latest {latest}")]
    if every != -1:
        policies.append((managers.EveryNSteps(interval_steps=every), f"every {every} {unit}"))
    saved = [_SavedCheckpoint(step=number) for number in numbers]
    reasons: dict[int, list[str]] = {number: [] for number in numbers}
    for policy, reason in policies:
        for number, keep in zip(numbers, _apply_policy(policy, saved), strict=True):
            if keep:
                reasons[number].append(reason)
    if numbers:
        reasons[numbers[-1]][0] = "the latest"
    return {number: ", ".join(texts) for number, texts in reasons.items() if texts}


def keep_best(scores: Sequence[float], *, count: int, rule: str) -> list[int]:
    """Select the best checkpoints to keep.

    Args:
      scores: one per checkpoint, without NaN; of equal scores the later one is kept.
      count: how many to keep.
      rule: 'greater' or 'less': which score is better.

    Returns:
      The positions in `scores` of the checkpoints to keep, the best first.
    """
    from orbax.checkpoint import checkpoint_managers as managers

    policy = managers.BestN(get_metric_fn=float, reverse=rule == "less", n=count)
    saved = [_SavedCheckpoint(step=i, metrics=score) for i, score in enumerate(scores)]
    kept = [i for i, keep in enumerate(_apply_policy(policy, saved)) if keep]
    sign = -1 if rule == "greater" else 1
    return sorted(kept, key=lambda i: (sign * scores[i], -i))


def is_better(rule: str, value: float, best: float | None) -> bool:
    """Return whether `value` is strictly better than `best`. NaN never is; any number is better than None."""
    if math.isnan(value):
        return False
    return best is None or (value > best if rule == "greater" else value < best)


def infer_rule(key: str, greater_keys: Sequence[str] = GREATER_KEYS, less_keys: Sequence[str] = LESS_KEYS) -> str:
    """Infer from the name of a metric whether greater or less is better.

    The first match counts, ignoring case: equal to one of `greater_keys`, equal to one of `less_keys`, contains one of
    `greater_keys`, contains one of `less_keys`.

    Returns:
      'greater' or 'less'.

    Raises:
      ValueError: no match.
    """
    name = key.lower()
    lists = (("greater", [k.lower() for k in greater_keys]), ("less", [k.lower() for k in less_keys]))
    for rule, keys in lists:
        if name in keys:
            return rule
    for rule, keys in lists:
        if any(part in name for part in keys):
            return rule
    raise ValueError(
        f"cannot infer from the name {key!r} whether greater or less is better; pass rule='greater' or rule='less' "
        f"(greater: names with {', '.join(greater_keys)}; less: names with {', '.join(less_keys)})"
    )


def check_rule(rule: str) -> str:
    """Return `rule` unchanged.

    Raises:
      KeyError: it is neither 'greater' nor 'less'.
    """
    if rule not in RULES:
        raise UnknownNameError(f"`rule` must be 'greater' or 'less', got {rule!r}{closest(str(rule), RULES)}")
    return rule


def pick_metric(metrics: Mapping[str, object], key: str) -> float | None:
    """Return the metric `key` as a float, or None if it is None.

    Raises:
      KeyError: it is not in `metrics`; the message lists the available metrics. TypeError: it is not a number.
    """
    if key not in metrics:
        names = ", ".join(map(str, metrics))
        raise UnknownNameError(f"the validation returned no metric {key!r}{closest(key, metrics)} (returned: {names})")
    value = metrics[key]
    if value is None:
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"the metric {key!r} must be a number, got {value!r}") from None


class _SavedCheckpoint(NamedTuple):
    """Hold the attributes of a checkpoint that Orbax's policies read."""

    step: int
    metrics: float | None = None
    time: datetime = datetime.fromtimestamp(0, UTC)  # not used by the policies here


def _apply_policy(policy: Any, checkpoints: Sequence[_SavedCheckpoint]) -> Sequence[bool]:
    from orbax.checkpoint import checkpoint_managers

    return policy.should_preserve(checkpoints, context=checkpoint_managers.preservation_policy.PreservationContext())
