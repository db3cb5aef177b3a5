"""Which of two values of a metric is the better one, inferred from the metric's name as MMEngine does."""

import math
from collections.abc import Mapping, Sequence

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
