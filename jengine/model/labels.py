"""Error messages for class indices out of range, made once a loss or metric is NaN.

Losses and metrics are NaN for such labels. The number of classes, and which batch entry holds the
labels, are known where a loss or metric calls `require_class_indices`. So `find_wrong_labels`
traces the step again, with the labels of the batch as constants of a type that is checked there.
The device never takes part. Labels that the step itself computes (in an augmentation, or in the
loss) are not entries of the batch, so they are not found.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jengine.config import paths
from jengine.data.masking import get_mask

# What an explainer replaces with the settings of a config.
OUTPUT_SETTINGS = "in `model.module`"
LABEL_SETTINGS = "in the dataset"


class _WrongLabelsError(Exception):
    """Labels out of range; ends the trace."""


class _Entry(np.ndarray):
    """Integers of a batch entry, which `require_class_indices` checks; results of NumPy
    functions are not.
    """

    path = ""  # dotted
    counted: Any = None  # bool, the examples that are not padding; None for all


def find_wrong_labels(step: Callable[[Any], Any], batch: Any) -> str | None:
    """Return what is wrong with the labels in a batch; None if nothing is, or if the step cannot be
    traced.

    >>> from jengine.model.losses import CrossEntropy
    >>> find_wrong_labels(
    ...     lambda batch: CrossEntropy()(np.zeros((2, 3)), batch), {"label": np.array([0, -1])}
    ... )
    "`CrossEntropy.label` must be class indices from 0 to 2, as the outputs have 3 classes, got -1
    to 0 in ..."

    Args:
      step: batch -> anything; calls losses or metrics.
      batch: NumPy arrays.
    """
    mask = get_mask(batch)

    def watch(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu":
            return leaf
        entry = leaf.view(_Entry)
        entry.path = path
        entry.counted = (
            None if mask is None or np.shape(mask) != leaf.shape[:1] else np.asarray(mask, bool)
        )
        return entry

    watched = paths.map_with_path(watch, batch)
    with contextlib.suppress(Exception):  # such as a step that runs only on its mesh
        try:
            # Traced without arguments: labels stay NumPy arrays, whose values are known, and
            # nothing is computed.
            jax.eval_shape(lambda: step(watched))
        except _WrongLabelsError as error:
            return str(error)
    return None


def explain_axes(outputs: tuple[int, ...], labels: tuple[int, ...]) -> str:
    """Return the likely reason why the shape of outputs does not fit that of labels, for an error
    message; or "".

    >>> explain_axes((2,), (16,))
    '; the outputs have no axis of examples, as if the batch were one example: do images lack
    channels, x[..., None]?'
    """
    if len(outputs) == len(labels) and outputs[:1] != labels[:1]:
        return (
            "; the outputs have no axis of examples, as if the batch were one example: do images "
            "lack channels, x[..., None]?"
        )
    if len(outputs) > len(labels) + 1 and outputs[:1] == labels[:1]:
        return (
            "; the network keeps axes of its inputs: flatten them, x.reshape(len(x), -1), in the "
            "network, or the samples in the dataset"
        )
    return ""


def require_class_indices(
    labels: Any, num_classes: int, argument: str, ignore_index: int | None = None
) -> None:
    """Declare that a batch entry has class indices; a NaN loss then names those out of range.

    Args:
      labels: the batch entry as it is, not yet converted; integers in any shape.
      num_classes: the number of classes in the outputs.
      argument: the argument that names the labels, for the error message: `CrossEntropy.label`.
      ignore_index: a further label that is allowed.
    """
    # In a compiled step labels are tracers without values: the check is made on the host, for the
    # batch of a NaN loss.
    if not isinstance(labels, _Entry) or not labels.path:
        return
    values = np.asarray(labels)
    if labels.counted is not None:
        values = values[labels.counted]
    if ignore_index is not None:
        values = values[values != ignore_index]
    wrong = np.unique(values[(values < 0) | (values >= num_classes)])
    if not wrong.size:
        return
    advice = (
        "; `ignore_index` sets a value that marks what to leave out" if values.min() < 0 else ""
    )
    outputs = ""
    # Negative labels are markers, which more outputs would not make valid.
    if values.min() >= 0:
        needed = f"at least {values.max() + 1} outputs"
        outputs = (
            f"; change the labels {LABEL_SETTINGS}, or give the model {needed} {OUTPUT_SETTINGS}"
        )
    if ignore_index is None and len(wrong) == 1:
        advice = f"; set ignore_index={wrong[0]} if this value marks what to leave out"
    raise _WrongLabelsError(
        f"`{argument}` must be class indices from 0 to "
        f"{num_classes - 1}{'' if ignore_index is None else f' or ignore_index={ignore_index}'}, "
        f"as the outputs have {num_classes} classes, got {values.min()} to {values.max()} in the "
        f"entry {labels.path!r} of a batch{outputs}{advice}"
    )


def require_tokens(tokens: Any, vocab_size: int, argument: str) -> None:
    """Declare that a batch entry has tokens; a NaN loss then names those outside the vocabulary.

    Args:
      tokens: the batch entry as it is; integers in any shape.
      vocab_size: the number of tokens in the vocabulary.
      argument: the argument that names the tokens, for the error message: `TransformerLM.tokens`.
    """
    if not isinstance(tokens, _Entry) or not tokens.path or not tokens.size:
        return
    least = int(tokens.min())
    most = int(tokens.max())
    if least < 0 or most >= vocab_size:
        raise _WrongLabelsError(
            f"`{argument}` must be from 0 to {vocab_size - 1}, as vocab_size = {vocab_size}, got "
            f"{least} to {most} in the entry {tokens.path!r} of a batch; take the tokenizer of "
            "the model, or another `vocab_size`"
        )
