"""Tabulate parameter groups: their rules, sizes, learning rates and weight decays."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jengine.optim.param_groups.param_group import GroupLayout, ParamGroup

COLUMNS = ("group", "patterns", "tensors", "parameters", "lr", "weight decay")


def group_table(
    groups: Sequence[ParamGroup], layout: GroupLayout, shapes: Mapping[str, tuple[int, ...]], unmatched: Iterable[str]
) -> list[list[str]]:
    """Return the rows of the table with the columns COLUMNS.

    Args:
      groups: the parameter groups.
      layout: the group of each leaf.
      shapes: shape of each leaf by dotted path.
      unmatched: custom keys that match no parameter; each gets a row.

    Returns:
      One row per group, one for frozen parameters if there are any, and one per unmatched key. A parameter whose
      layers are in several groups counts as a tensor in each, with the elements of its layers in that group.
    """
    tensors = [0] * (len(groups) + 1)
    parameters = [0] * (len(groups) + 1)
    for path, member in zip(layout.paths, layout.groups, strict=True):
        size = math.prod(shapes[path])
        layers = member if isinstance(member, tuple) else (len(groups) if member is None else member,)
        for group in set(layers):
            tensors[group] += 1
            parameters[group] += size // len(layers) * layers.count(group)
    rows = [
        [
            str(group.get("group_name", index)),
            ", ".join(group.patterns),
            str(tensors[index]),
            f"{parameters[index]:,}",
            _format(group.get("lr")),
            _format(group.get("weight_decay")),
        ]
        for index, group in enumerate(groups)
    ]
    if tensors[-1]:
        rows.append(["frozen", "", str(tensors[-1]), f"{parameters[-1]:,}", "", ""])
    rows += [["none", f"{key} (matches nothing)", "0", "0", "", ""] for key in unmatched]
    return rows


def _format(value: Any) -> str:
    return "" if value is None else f"{value:.6g}"
