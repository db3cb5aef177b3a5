"""Explain why the shape of labels does not fit that of the outputs."""

import re
from collections.abc import Mapping
from typing import Any


def explain_label_axes(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return the likely reason why the axes of outputs and labels do not fit.

    Explainer, for the errors of `CrossEntropy` and `Accuracy`, which have both shapes.
    """
    about_axes = r"`(CrossEntropy\.label` must be class indices|Accuracy\.label` must fit)"
    shapes = re.findall(r"[a-z]+\d+\[([\d,]*)\]", str(error))
    if not re.match(about_axes, str(error)) or len(shapes) != 2:
        return None
    outputs, labels = (shape.split(",") if shape else [] for shape in shapes)
    if len(outputs) == len(labels) and outputs[:1] != labels[:1]:
        return (
            "the outputs have no axis of examples, as if the batch were one example: do images "
            "lack channels, x[..., None]?"
        )
    if outputs and labels and outputs[0] != labels[0]:
        return (
            f"the outputs have {outputs[0]} in the place of {labels[0]} examples: look for a mean, "
            "sum or reshape over axis 0 in the network"
        )
    if len(outputs) == len(labels) == 2 and outputs == labels:
        return "the labels are in one-hot form: make them class indices, labels.argmax(-1)"
    if len(outputs) > len(labels) + 1 and outputs[:1] == labels[:1]:
        return (
            "the network keeps axes of its inputs: flatten them, x.reshape(len(x), -1), in the "
            "network, or the samples in the dataset"
        )
    return None
