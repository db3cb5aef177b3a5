"""Labels of losses and metrics: what they must be."""

from typing import Any


def require_class_indices(
    labels: Any, num_classes: int, argument: str, ignore_index: int | None = None
) -> None:
    """Declare that a batch entry has class indices; a NaN loss then names those out of range.

    In a compiled step labels have no values: an extra calls the loss or metric again on the host,
    with arrays that have the method `check_classes`.

    Args:
      labels: the batch entry as it is, not yet converted; integers in any shape.
      num_classes: the number of classes in the outputs.
      argument: the argument that names the labels, for the error message: `CrossEntropy.label`.
      ignore_index: a further label that is allowed.
    """
    if (check := getattr(labels, "check_classes", None)) is not None:
        check(num_classes, argument, ignore_index)
