"""Error messages for class indices out of range, made once a loss or metric is NaN.

Losses and metrics are NaN for such labels. The number of classes, and which batch entry holds the
labels, are known where a loss or metric calls `require_class_indices`. So `find_wrong_labels`
traces the step again, with the labels of the batch as constants of a type that is checked there.
The device never takes part. Labels that the step itself computes (in an augmentation, or in the
loss) are not entries of the batch, so they are not found.
"""

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.data.host_entries import Batch, select_arrays
from jengine.data.masking import get_mask, whole_batches
from jengine.evaluation.evaluator import Evaluator
from jengine.evaluation.metric import Predictions
from jengine.runner.eval_loops import Evaluation

# What an explainer replaces with the settings of a config.
OUTPUT_SETTINGS = "in `model.module`"
LABEL_SETTINGS = "in the dataset"
_CHECKED: "weakref.WeakSet[Evaluation]" = weakref.WeakSet()


class _WrongLabelsError(Exception):
    """Labels out of range; ends the trace."""


class _Entry(np.ndarray):
    """Integers of a batch entry, which `require_class_indices` checks.

    Results of NumPy functions, which have no path, are not.
    """

    path = ""  # dotted
    counted: Any = None  # bool, the examples that are not padding; None for all

    def check_classes(self, num_classes: int, argument: str, ignore_index: int | None) -> None:
        """Raise an error about labels that are no classes; see `require_class_indices`."""
        if not self.path:
            return
        values = np.asarray(self)
        if self.counted is not None:
            values = values[self.counted]
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
                f"; change the labels {LABEL_SETTINGS}, or give the model {needed} "
                f"{OUTPUT_SETTINGS}"
            )
        if ignore_index is None and len(wrong) == 1:
            advice = f"; set ignore_index={wrong[0]} if this value marks what to leave out"
        ignored = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise _WrongLabelsError(
            f"`{argument}` must be class indices from 0 to {num_classes - 1}{ignored}, as the "
            f"outputs have {num_classes} classes, got {values.min()} to {values.max()} in the "
            f"entry {self.path!r} of a batch{outputs}{advice}"
        )

    def check_tokens(self, vocab_size: int, argument: str) -> None:
        """Raise an error about inputs that are not in the vocabulary."""
        if not self.path or not self.size:
            return
        least = int(self.min())
        most = int(self.max())
        if least < 0 or most >= vocab_size:
            raise _WrongLabelsError(
                f"`{argument}` must be from 0 to {vocab_size - 1}, as vocab_size = {vocab_size}, "
                f"got {least} to {most} in the entry {self.path!r} of a batch; take the tokenizer "
                "of the model, or another `vocab_size`"
            )


def find_wrong_labels(step: Callable[[Any], Any], batch: Any) -> str | None:
    """Return what is wrong with the labels in a batch.

    None if nothing is, or if the step cannot be traced.

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


def check_labels_of_nan(
    evaluation: Evaluation, results: Mapping[str, Any], predictions: Predictions, count: int | None
) -> None:
    """Read the data of an evaluation again if a result is NaN, and check the labels.

    Once: the next evaluation has the same data.

    Args:
      evaluation: the evaluation.
      results: its metrics by name.
      predictions: for any batch.
      count: the batches in the pass.

    Raises:
      ConfigError: labels that are no classes.
    """
    has_nan = any(isinstance(value, float) and math.isnan(value) for value in results.values())
    if not has_nan or evaluation in _CHECKED:
        return
    _CHECKED.add(evaluation)
    loader = evaluation.dataloader
    loader.set_epoch(0)
    with whole_batches(loader.batch_axis is None):
        batches = map(select_arrays, itertools.islice(loader, count))
        check_labels(evaluation.evaluator, predictions, batches)


def check_labels(evaluator: Evaluator, predictions: Predictions, batches: Iterable[Any]) -> None:
    """Raise ConfigError if labels in `batches`, of NumPy arrays, are not classes, which makes a
    metric NaN.

    `predictions` may be `jax.ShapeDtypeStruct`s with the shapes of the predictions for a batch.
    """
    state = jax.eval_shape(evaluator.init)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), predictions)

    def update(batch: Batch) -> Any:  # the labels keep their values
        return jax.eval_shape(
            lambda state, predictions: evaluator.update(state, predictions, batch), state, shapes
        )

    for batch in batches:
        if (message := find_wrong_labels(update, batch)) is not None:
            raise ConfigError(message)
