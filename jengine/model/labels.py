"""Host check that class indices are in range, without waiting for the device.

A loss or metric calls `require_class_indices` while it is traced: there the number of classes is known, and which batch
entry holds the labels. `LabelChecks` records both, and checks host batches against them before they are used. The
device never takes part. Labels that the step itself computes (in an augmentation, or in the loss) are not entries of
the host batch, so they are not checked here; `CrossEntropy` returns NaN for those out of range.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jengine import paths
from jengine.data.masking import get_mask
from jengine.errors import ConfigError


class _Labels(NamedTuple):
    """Batch entry that must hold class indices below `num_classes`, or `ignore_index`."""

    path: str  # dotted
    argument: str  # that names the labels: `CrossEntropy.label`
    num_classes: int
    ignore_index: int | None


class LabelChecks:
    """Check for the labels in host batches, until `stop`.

    Batches that are added before the step is first traced wait for it, and are checked during the trace; later ones
    are checked at once.
    """

    def __init__(self) -> None:
        self._labels: dict[_Labels, None] = {}
        self._waiting: list[Any] | None = []  # batches before the first trace; None after it
        self._is_stopped = False

    def watch(self, step: Callable[..., Any], argument: int) -> Callable[..., Any]:
        """Return `step`, a function to compile, such that each trace records the labels in the batch, an argument."""

        @functools.wraps(step)
        def watched(*args: Any) -> Any:
            token = _TRACE.set((paths.leaves_with_path(args[argument]), self.require))
            try:
                outputs = step(*args)
            finally:
                _TRACE.reset(token)
            self._waiting = None
            return outputs

        return watched

    def require(self, labels: _Labels) -> None:
        """Check the waiting batches, and those to come."""
        self._labels[labels] = None
        for batch in self._waiting or ():
            _check(labels, batch)

    def add(self, batch: Any) -> None:
        """Check the labels in a host batch, or let it wait for the first trace; ConfigError if one is out of range."""
        if self._is_stopped:
            return
        if self._waiting is not None:
            self._waiting.append(batch)
        for labels in self._labels:
            _check(labels, batch)

    def stop(self) -> None:
        """Check no further batches."""
        self._is_stopped, self._waiting = True, None


_Trace = tuple[list[tuple[str, Any]], Callable[[_Labels], None]]  # the batch's tracers by path, `LabelChecks.require`
_TRACE: contextvars.ContextVar[_Trace | None] = contextvars.ContextVar("jengine_watched_batch", default=None)


def require_class_indices(labels: Any, num_classes: int, argument: str, ignore_index: int | None = None) -> None:
    """Have host batches checked for labels out of range; losses and metrics should call it in the traced step.

    Outside an engine step it has no effect.

    Args:
      labels: the batch entry as it is, not yet converted; integers in any shape.
      num_classes: the number of classes in the outputs.
      argument: the argument that names the labels, for the error message: `CrossEntropy.label`.
      ignore_index: a further label that is allowed.

    Raises:
      ConfigError: a host batch that waits for the step has a label out of range.
    """
    if (trace := _TRACE.get()) is not None:
        leaves, require = trace
        for path in [path for path, leaf in leaves if leaf is labels]:
            require(_Labels(path, argument, num_classes, ignore_index))


def _check(required: _Labels, batch: Any) -> None:
    """Raise ConfigError if a label of an example that is not padding is out of range."""
    path, argument, num_classes, ignored = required
    labels = paths.flatten(batch).get(path)
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu" or not labels.size:
        return
    if labels.min() >= 0 and labels.max() < num_classes:
        return
    if (mask := get_mask(batch)) is not None and np.shape(mask) == labels.shape[:1]:
        labels = labels[np.asarray(mask, bool)]
    if ignored is not None:
        labels = labels[labels != ignored]
    wrong = np.unique(labels[(labels < 0) | (labels >= num_classes)])
    if not wrong.size:
        return
    advice = "`ignore_index` sets a value that marks what to leave out"
    if ignored is None and len(wrong) == 1:
        advice = f"set ignore_index={wrong[0]} if this value marks what to leave out"
    raise ConfigError(
        f"`{argument}` must be class indices from 0 to {num_classes - 1}"
        f"{'' if ignored is None else f' or ignore_index={ignored}'}, as the outputs have {num_classes} classes, got "
        f"{labels.min()} to {labels.max()} in the entry {path!r} of a batch; {advice}"
    )
