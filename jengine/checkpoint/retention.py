"""Rules for which checkpoints to keep: by interval, by recency and by the best value of a metric."""

import math
from collections.abc import Mapping, Sequence

from jengine.errors import UnknownNameError, closest, did_you_mean

GREATER_KEYS = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
LESS_KEYS = ("loss",)
RULES = ("greater", "less")


def keep_regular(numbers: Sequence[int], *, latest: int, every: int = -1, unit: str = "epochs") -> dict[int, str]:
    """Select the regular checkpoints to keep.

    Args:
      numbers: the epoch or iteration of each checkpoint, oldest save first.
      latest: how many of the newest to keep; -1 for all.
      every: keep multiples of this number for good; -1 for none.
      unit: 'epochs' or 'iterations', for the reasons.

    Returns:
      The numbers to keep, in the same order, with the reasons. The newest is always among them.

    >>> keep_regular([2, 3, 4, 5], latest=2, every=2)
    {2: 'every 2 epochs', 4: 'one of the latest 2, every 2 epochs', 5: 'the latest'}
    """
    if latest == -1:
        return dict.fromkeys(numbers, "all are kept")
    reasons = {}
    for age, number in zip(range(len(numbers) - 1, -1, -1), numbers, strict=True):
        # Both rules may hold for a checkpoint, and the list of them tells which setting keeps it.
        texts = ["the latest" if age == 0 else f"one of the latest {latest}"] if age < latest else []
        if every != -1 and number % every == 0:
            texts.append(f"every {every} {unit}")
        if texts:
            reasons[number] = ", ".join(texts)
    return reasons


def keep_best(scores: Sequence[float], *, count: int, rule: str) -> list[int]:
    """Select the best checkpoints to keep.

    Args:
      scores: one per checkpoint, without NaN; among equal scores the later one is better.
      count: how many to keep.
      rule: 'greater' or 'less': which score is better.

    Returns:
      Positions in `scores`, the best first.

    >>> keep_best([0.5, 0.7, 0.5], count=2, rule="less")
    [2, 0]
    """
    sign = -1 if rule == "greater" else 1
    return sorted(range(len(scores)), key=lambda i: (sign * scores[i], -i))[:count]


def is_better(rule: str, value: float, best: float | None) -> bool:
    """Return whether `value` is strictly better than `best`. NaN never is; any number is better than None.

    >>> is_better("less", 0.1, 0.2), is_better("greater", 0.1, 0.2), is_better("greater", 0.1, None)
    (True, False, True)
    """
    if math.isnan(value):
        return False
    return best is None or (value > best if rule == "greater" else value < best)


class UnknownDirectionError(ValueError):
    """Whether greater or less is better cannot be told from the name of a metric."""

    def __init__(self, message: str, metric: str) -> None:
        super().__init__(message)
        self.metric = metric


def infer_rule(key: str, greater_keys: Sequence[str] = GREATER_KEYS, less_keys: Sequence[str] = LESS_KEYS) -> str:
    """Infer from a metric name whether 'greater' or 'less' is better.

    The first match counts, ignoring case: equal to one of `greater_keys`, equal to one of `less_keys`, contains one of
    `greater_keys`, contains one of `less_keys`.

    Raises:
      UnknownDirectionError: no match.

    >>> infer_rule("val/accuracy"), infer_rule("loss")
    ('greater', 'less')
    """
    name = key.lower()
    lists = (("greater", [k.lower() for k in greater_keys]), ("less", [k.lower() for k in less_keys]))
    for rule, keys in lists:
        # Exact names of both lists before parts of names, as in MMEngine: a part may be in names of either kind.
        if name in keys:
            return rule
    for rule, keys in lists:
        if any(part in name for part in keys):
            return rule
    hint = did_you_mean(name, ("accuracy", *greater_keys, *less_keys), cutoff=0.75)
    raise UnknownDirectionError(
        f"cannot infer from the name {key!r} whether greater or less is better{f'{hint} Else' if hint else ';'} pass "
        f"rule='greater' or rule='less' (greater: names with {', '.join(greater_keys)}; less: names with "
        f"{', '.join(less_keys)})",
        key,
    )


def check_rule(rule: str) -> str:
    """Return `rule`; raise KeyError if it is neither 'greater' nor 'less'."""
    if rule not in RULES:
        raise UnknownNameError(f"`rule` must be 'greater' or 'less', got {rule!r}{closest(str(rule), RULES)}")
    return rule


def pick_metric(metrics: Mapping[str, object], key: str) -> float | None:
    """Return the metric `key` as a float, or None if it is None.

    Raises:
      KeyError: it is not in `metrics`; the message lists the available metrics. TypeError: it is not a number.

    >>> pick_metric({"acc": 0.5}, "acc")
    0.5
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
