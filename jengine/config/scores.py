"""Comparison of metric values: which value is better, and the direction of a metric by its name.

A value is better if it is strictly better, by more than the threshold; the first of equal values is
the best, and NaN is never better.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from jengine.config.errors import UnknownNameError, closest

RULES = ("greater", "less")
Rule = Literal["greater", "less"]  # which of two values is better

# Words of metric names, and phrases of words, by direction. `_` separates the words of a phrase.
# The results of all metrics in this package are among them.
_GREATER_WORDS = (
    "accuracy acc aacc macc precision recall f1 fscore iou miou dice mdice jaccard auc auroc "
    "aucroc aucpr auprc map ap ar@ mrr ndcg r2 kappa mcc mprecision mrecall mfscore hmean pck "
    "bleu rouge meteor cider psnr ssim exact_match log_likelihood hits hit_rate tpr "
    "true_positive_rate specificity f_score f_measure chrf rougel"
)
_LESS_WORDS = (
    "loss losses error errors err mse rmse mae mape smape msle rmsle perplexity ppl "
    "bits_per_byte bits_per_character bits_per_dim bpb bpc bpd cross_entropy nll ece mce brier "
    "wer cer eer fid kid lpips epe mpjpe crps crossentropy logloss fpr fnr false_positive_rate "
    "miss_rate edit_distance latency"
)
_QUALIFIER = re.compile(r"top\d*")  # of accuracies and of errors; alone it is an accuracy
# Such a word may turn the direction around, or makes something else of the metric: 'neg_loss',
# 'accuracy_gap'
_TURNING_WORDS = (
    "neg negative minus inv inverse gap drop gain improvement reduction delta diff difference "
    "std var variance stderr sem ci skill non forgetting time seconds epochs steps threshold "
    "scale weight lambda rank count size"
)
_COMPLEMENT = re.compile(r"1(00)?\s*-\s*[^\W\d]")  # '1-ssim', '100 - accuracy'


def is_better(rule: str, value: float, best: float | None, threshold: float = 0.0) -> bool:
    """Return whether `value` is better than `best` by more than `threshold`.

    NaN is never better, and any number is better than None.

    >>> is_better("less", 0.1, 0.2), is_better("less", 0.2, 0.2), is_better("greater", 0.1, None)
    (True, False, True)
    """
    if math.isnan(value):
        return False
    return best is None or (
        value > best + threshold if rule == "greater" else value < best - threshold
    )


def sort_key(rule: str, value: float | None) -> float:
    """Return a number by which better values come first, and NaN and None last.

    >>> sorted([0.5, math.nan, 0.7], key=lambda value: sort_key("greater", value))
    [0.7, 0.5, nan]
    """
    if value is None or math.isnan(value):
        return math.inf
    return -value if rule == "greater" else value


def keep_best(scores: Sequence[float | None], *, count: int, rule: str) -> list[int]:
    """Select the best scores.

    Args:
      scores: in the order in which they were measured; NaN and None are never selected.
      count: how many to select.
      rule: 'greater' or 'less': which score is better.

    Returns:
      Positions in `scores`, the best first; of equal scores the first is better.

    >>> keep_best([0.5, 0.7, 0.5, math.nan], count=2, rule="less")
    [0, 2]
    """
    numbers = [
        (sort_key(rule, score), i)
        for i, score in enumerate(scores)
        if score is not None and score == score
    ]
    return [i for _, i in sorted(numbers)[:count]]


class UnknownDirectionError(ValueError):
    """Whether greater or less is better cannot be told from the name of a metric."""

    def __init__(self, message: str, metric: str) -> None:
        super().__init__(message)
        self.metric = metric


def infer_rule(key: str, greater_keys: Sequence[str] = (), less_keys: Sequence[str] = ()) -> str:
    """Return from a metric name whether 'greater' or 'less' is better.

    Only the part after the last '/' counts, and in it only whole words: the parts before it name
    evaluations and metrics. Case and numbers at the end of a word do not matter.

    Args:
      key: the metric name.
      greater_keys, less_keys: names, or words and phrases of names, that come before the known
        words.

    Raises:
      UnknownDirectionError: no word is known, words of both directions are in the name, or a word
        such as 'gap' makes something else of the metric.

    >>> infer_rule("desktop/accuracy"), infer_rule("top/loss"), infer_rule("top5_error")
    ('greater', 'less', 'less')
    """
    for rule, keys in (("greater", greater_keys), ("less", less_keys)):
        # Exact names of both lists before words: a word may be in names of either kind.
        if key.lower() in map(str.lower, keys):
            return rule
    words = split_words(key)
    if greater_keys or less_keys:
        own = (["_".join(split_words(key)) for key in keys] for keys in (greater_keys, less_keys))
        if found := _find_rules(words, *own):
            return found[0]  # the order in which MMEngine searches its lists
    if set(words).isdisjoint(_TURNING_WORDS.split()) and not _COMPLEMENT.match(
        key.rpartition("/")[2]
    ):
        found = _find_rules(words, _GREATER_WORDS.split(), _LESS_WORDS.split())
        # 'accuracy/top1' and 'top1', but not 'error/top1'
        if not found and any(map(_QUALIFIER.fullmatch, words)):
            found = [
                "greater",
                *_find_rules(split_words("_".join(key.split("/")[-2:])), (), _LESS_WORDS.split()),
            ]
        if len(found) == 1:
            return found[0]
    raise UnknownDirectionError(
        f"cannot infer from the name {key!r} whether greater or less is better; pass "
        "rule='greater' or rule='less'",
        key,
    )


def split_words(key: str) -> list[str]:
    """Return the words in the last part of a metric name, in lower case.

    >>> split_words("coco/bbox_mAP-50")
    ['bbox', 'map', '50']
    """
    return re.findall(r"[^\W_]+@?", key.rpartition("/")[2].lower())


def _find_rules(words: Sequence[str], greater: Iterable[str], less: Iterable[str]) -> list[str]:
    """Return the directions whose words or phrases are among the words of a name."""
    # 'recall@5' and 'top1' have the word without the number too; 'f1' and 'AR@' are words as they
    # are.
    text = f"_{'_'.join(words)}_"
    text += text.replace("@", "") + re.sub(r"(?<=[^_\d@])[\d@]+(?=_)", "", text)
    found = []
    for rule, known in zip(RULES, (greater, less), strict=True):
        if [phrase for phrase in known if f"_{phrase}_" in text]:
            found.append(rule)
    return found


def pick_metric(metrics: Mapping[str, object], key: str) -> float | None:
    """Return the metric `key` as a float, or None if it is None.

    Raises:
      KeyError: it is not in `metrics`; the message lists the available metrics. TypeError: it is
        not a number.

    >>> pick_metric({"acc": 0.5}, "acc")
    0.5
    """
    if key not in metrics:
        names = ", ".join(map(str, metrics))
        raise UnknownNameError(
            f"the validation returned no metric {key!r}{closest(key, metrics)} (returned: {names})"
        )
    value = metrics[key]
    if value is None:
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"the metric {key!r} must be a number, got {value!r}") from None
