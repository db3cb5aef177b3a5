"""What is known of the arrays in a traced loss, axis by axis, as `parameter_uses` reads it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Axes = tuple[frozenset[Any], ...]  # for each axis of an array a set
Shape = tuple[int, ...]
HEADS = "heads"  # label of an axis along which attention is a batch of products
COUNT = "count"  # label of an axis along which an array counts
EXPERTS = "experts"  # label of an axis with the outputs of experts that a router has chosen
WHOLE = "whole"  # an axis of an array is a parameter's axis,
FIRST = "first"  # or the first part of it after a reshape,
PART = "part"  # or another part


class Value(NamedTuple):
    """What is known of an array.

    Attributes:
      labels: for each axis of an activation, the axes of parameters from which it comes: (bit,
        axis, whole or part).
      views: by parameter, for each axis the parameter's axes in it; empty for activations, and for
        constants.
      is_activation: whether the array is none of the parameters, nor computed from these alone.
      is_fed: whether it depends on the batch.
      is_live: whether it depends on anything that is not a constant.
      before: matrices on the way here, bits.
      ends: those of which the result reaches the array without another matrix.
      product: the matrix of which this is the product, perhaps with a bias.
      is_root: a root, to divide by. is_normal: what has been divided by one.
      is_count: made of 0, 1, 2, ... or of another constant that is not one number.
      is_one_hot: compared with such a constant.
    """

    labels: Axes = ()
    views: tuple[tuple[int, Axes], ...] = ()
    is_activation: bool = False
    is_fed: bool = False
    is_live: bool = False
    before: int = 0
    ends: int = 0
    product: int = 0
    is_root: bool = False
    is_normal: bool = False
    is_count: bool = False
    is_one_hot: bool = False


def fold(values: Sequence[Value]) -> Value:
    """Return what is known of a combination of values.

    Of a sum or product of channels and something computed from them, such as a residual connection
    or a gate, the former end where they did.
    """
    result = values[0] if values else Value()
    for value in values[1:]:
        a = result.before
        b = value.before
        have_channels = any(x and y for x, y in zip(result.labels, value.labels, strict=False))
        if have_channels and a != b and a and b and a & b in (a, b):
            ends = result.ends if a & b == a else value.ends
        else:
            ends = result.ends | value.ends
        result = Value(
            labels=union(result.labels, value.labels),
            views=(*result.views, *(view for view in value.views if view not in result.views)),
            is_activation=result.is_activation or value.is_activation,
            is_fed=result.is_fed or value.is_fed,
            is_live=result.is_live or value.is_live,
            before=a | b,
            ends=ends,
            product=result.product | value.product,
            is_root=result.is_root or value.is_root,
            is_normal=result.is_normal or value.is_normal,
            is_count=result.is_count or value.is_count,
            is_one_hot=result.is_one_hot or value.is_one_hot,
        )
    return result


def broadcasts(shape: Shape, to: Shape) -> bool:
    """Return whether a shape is one number, or that of an array with axes of size one."""
    pairs = zip(shape, to, strict=False)
    return not shape or (len(shape) == len(to) and all(a in (1, b) for a, b in pairs))


def map_axes(value: Value, change: Callable[[Axes], Axes]) -> Value:
    """Return a value whose axes have been rearranged by `change`."""
    return value._replace(
        labels=change(value.labels) if value.labels else (),
        views=tuple((bit, change(axes)) for bit, axes in value.views),
    )


def union(a: Axes, b: Axes) -> Axes:
    """Return the unions of the sets of two arrays, axis by axis.

    Of arrays with different numbers of axes, the sets of the one that has more.
    """
    if not a or not b or len(a) != len(b):
        return a if len(a) >= len(b) else b
    return tuple(x | y for x, y in zip(a, b, strict=True))


def labels_at(labels: Axes, i: int) -> frozenset[Any]:
    """Return the labels of an axis, none for an array without labels."""
    return labels[i] if labels else frozenset()


def owned_labels(labels: Axes, i: int) -> frozenset[Any]:
    """Return the axes of parameters from which an axis comes."""
    return frozenset(label for label in labels_at(labels, i) if not isinstance(label, str))


def no_labels(var: Any) -> Axes:
    """Return an empty set for each axis of a variable of a jaxpr."""
    return (frozenset(),) * var.aval.ndim


def match_axes(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Return which axes of a reshaped array are made of which, axes of size one by themselves.

    >>> match_axes((2, 6, 1), (2, 2, 3))
    [([0], [0]), ([1], [1, 2]), ([2], [])]
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        before = old[i : i + 1]
        after = new[j : j + 1]
        if before == after:
            groups.append(([i], [j]))
            i = i + 1
            j = j + 1
        elif before == (1,):
            groups.append(([i], []))
            i += 1
        elif after == (1,):
            groups.append(([], [j]))
            j += 1
        else:
            a = i + 1
            b = j + 1
            while (x := math.prod(old[i:a])) != (y := math.prod(new[j:b])):
                a, b = (a + 1, b) if x < y else (a, b + 1)
            groups.append((list(range(i, a)), list(range(j, b))))
            i = a
            j = b
    return groups


def regroup_axis(before: Sequence[frozenset[Any]], position: int, count: int) -> frozenset[Any]:
    """Return the set of an axis after a reshape: number `position` of `count` made of `before`."""
    if len(before) == count == 1:
        return before[0]
    found: set[Any] = set()
    for index, axes in enumerate(before):
        for label in axes:
            if isinstance(label, int):  # an axis of a parameter
                found.add(label)
            elif not isinstance(label, str) and label[2] != PART:
                is_first = position == index == 0
                found.add((*label[:2], FIRST if is_first else PART))
            elif not isinstance(label, str):
                found.add(label)
    return frozenset(found)
