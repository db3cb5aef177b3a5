"""Check on the host that the class indices of a batch are in range, without waiting for the device.

A loss or metric calls `require_class_indices` while it is traced: there the number of classes is known, and which entry
of the batch the labels are. `LabelChecks` notes both, and checks the host batches against them before they are used.
The device never takes part. Labels that are computed within the step (by an augmentation, or in the loss) are not
entries of the host batch, so they are not checked here; `CrossEntropy` returns NaN for those out of range.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jengine import paths
from jengine.data.masking import get_mask
from jengine.errors import ConfigError

_WATCHING: contextvars.ContextVar["_Trace | None"] = contextvars.ContextVar("jengine_watched_batch", default=None)


class _Requirement(NamedTuple):
    """Require that the labels at `path` of a batch are class indices below `num_classes`, or `ignore_index`."""

    path: str  # dotted
    argument: str  # the argument that names the labels: `CrossEntropy.label`
    num_classes: int
    ignore_index: int | None

    def check(self, labels: np.ndarray, mask: np.ndarray | None) -> None:
        """Raise ConfigError if a label of an example that is not padding is out of range."""
        if not labels.size or (labels.min() >= 0 and labels.max() < self.num_classes):
            return
        if mask is not None and mask.shape == labels.shape[:1]:
            labels = labels[mask]
        if self.ignore_index is not None:
            labels = labels[labels != self.ignore_index]
        wrong = np.unique(labels[(labels < 0) | (labels >= self.num_classes)])
        if not wrong.size:
            return
        or_ignored = "" if self.ignore_index is None else f" or ignore_index={self.ignore_index}"
        if self.ignore_index is None and len(wrong) == 1:
            advice = f"set ignore_index={wrong[0]} if this value marks what to leave out"
        else:
            advice = "`ignore_index` sets a value that marks what to leave out"
        raise ConfigError(
            f"`{self.argument}` must be class indices from 0 to {self.num_classes - 1}{or_ignored}, as the outputs "
            f"have {self.num_classes} classes, got {labels.min()} to {labels.max()} in the entry {self.path!r} of a "
            f"batch; {advice}"
        )


class _Trace(NamedTuple):
    """Hold the batch of a step that is being traced, and where to note the labels in it."""

    leaves: list[tuple[str, Any]]  # dotted path and tracer
    checks: "LabelChecks"


def require_class_indices(labels: Any, num_classes: int, argument: str, ignore_index: int | None = None) -> None:
    """Have host batches checked for labels out of range; to be called by losses and metrics, in the traced step.

    Without an effect outside a step of the engine.

    Args:
      labels: the entry of the batch as it is, not yet converted; int of any shape.
      num_classes: number of classes of the outputs.
      argument: the argument that names the labels, for the error message: `CrossEntropy.label`.
      ignore_index: a further label that is allowed.

    Raises:
      ConfigError: a label of a host batch that waits for the step is out of range.
    """
    trace = _WATCHING.get()
    if trace is not None:
        for path, leaf in trace.leaves:
            if leaf is labels:
                trace.checks.require(_Requirement(path, argument, num_classes, ignore_index))


class LabelChecks:
    """Check the labels of host batches, until `stop`.

    Batches that are added before the step is first traced wait for it, and are checked in the trace, before they are
    used; later ones are checked at once.
    """

    def __init__(self) -> None:
        self._is_stopped = False
        self._requirements: dict[_Requirement, None] = {}
        self._waiting: list[tuple[dict[str, np.ndarray], np.ndarray | None]] = []
        self._is_traced = False

    def watch(self, step: Callable[..., Any], argument: int) -> Callable[..., Any]:
        """Return `step`, a function to compile, such that its traces note the labels in the batch, its argument."""

        @functools.wraps(step)
        def watched(*args: Any) -> Any:
            with self._trace(args[argument]):
                return step(*args)

        return watched

    def require(self, requirement: _Requirement) -> None:
        """Check the waiting batches, and those to come; an error ends the trace, which is otherwise not affected."""
        self._requirements[requirement] = None
        for batch in self._waiting:
            _check(requirement, *batch)

    def add(self, batch: Any) -> None:
        """Check the labels of a host batch, or let it wait for the first trace.

        Raises:
          ConfigError: a label is out of range.
        """
        if self._is_stopped or (self._is_traced and not self._requirements):
            return
        leaves = {path: leaf for path, leaf in paths.leaves_with_path(batch) if _is_integer_array(leaf)}
        mask = get_mask(batch)
        added = leaves, None if mask is None else np.asarray(mask, bool)
        if not self._is_traced:
            self._waiting.append(added)
        for requirement in self._requirements:
            _check(requirement, *added)

    def stop(self) -> None:
        """Check no further batches."""
        self._is_stopped, self._waiting = True, []

    @contextlib.contextmanager
    def _trace(self, batch: Any) -> Iterator[None]:
        token = _WATCHING.set(_Trace(paths.leaves_with_path(batch), self))
        try:
            yield
        finally:
            _WATCHING.reset(token)
        self._is_traced, self._waiting = True, []


def _check(requirement: _Requirement, leaves: dict[str, np.ndarray], mask: np.ndarray | None) -> None:
    if requirement.path in leaves:
        requirement.check(leaves[requirement.path], mask)


def _is_integer_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iu"
