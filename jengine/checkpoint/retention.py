"""Decide which checkpoints are kept: by interval, by recency and by the best metric."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jengine.errors import UnknownNameError, closest

GREATER_KEYS = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
LESS_KEYS = ("loss",)
RULES = ("greater", "less")


def infer_rule(key: str, greater_keys: Sequence[str] = GREATER_KEYS, less_keys: Sequence[str] = LESS_KEYS) -> str:
    """Whether a greater or a lesser value of the metric `key` is better.

    Case does not count. In this order: equal to one of `greater_keys`, to one of `less_keys`, containing one of
    `greater_keys`, containing one of `less_keys`.

    Returns:
      'greater' or 'less'.

    Raises:
      ValueError: neither list knows the name.
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
        f"whether a greater or a lesser {key!r} is better cannot be told from its name; give rule='greater' or "
        f"rule='less' (known are names with {', '.join(greater_keys)} as greater, {', '.join(less_keys)} as less)"
    )


def check_rule(rule: str) -> str:
    """Returns `rule` if it is one.

    Raises:
      KeyError: it is neither 'greater' nor 'less'.
    """
    if rule not in RULES:
        raise UnknownNameError(f"rule is 'greater' or 'less', found {rule!r}{closest(str(rule), RULES)}")
    return rule


def is_better(rule: str, value: float, best: float | None) -> bool:
    """Whether `value` beats `best` strictly. NaN beats nothing; any number beats None."""
    if math.isnan(value):
        return False
    return best is None or (value > best if rule == "greater" else value < best)


def pick_metric(metrics: Mapping[str, object], key: str) -> float | None:
    """The value of the metric `key` as a number; None if it was None.

    Raises:
      KeyError: it is not among `metrics`; the message names them. TypeError: it is no number.
    """
    if key not in metrics:
        raise UnknownNameError(
            f"the validation gave no metric {key!r}{closest(key, metrics)} (found: {', '.join(map(str, metrics))})"
        )
    value = metrics[key]
    if value is None:
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"the metric {key!r} is no number: {value!r}") from None


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
