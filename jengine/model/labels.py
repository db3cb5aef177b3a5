"""Labels of losses and metrics: what they must be, and why their shape does not fit."""

from typing import Any


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
