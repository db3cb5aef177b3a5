"""Tabulate parameter groups: their rules, sizes and numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jengine.optim.param_groups.param_group import Layout, ParamGroup

COLUMNS = ("group", "patterns", "tensors", "parameters", "lr", "weight decay")


def group_table(
    groups: Sequence[ParamGroup], layout: Layout, sizes: Mapping[str, tuple[int, ...]], unmatched: Iterable[str]
) -> list[list[str]]:
    """Return the rows under COLUMNS.

    Args:
      groups: the parameter groups.
      layout: which leaf belongs to which.
      sizes: shape of each leaf by dotted path.
      unmatched: custom keys that match nothing; each gets a row.

    Returns:
      One row a group, one for frozen parameters if there are any, one an unmatched key. A parameter whose layers are
      divided among groups counts as a tensor in each, with its layers there as parameters.
    """
    tensors = [0] * (len(groups) + 1)
    parameters = [0] * (len(groups) + 1)
    for path, member in zip(layout.paths, layout.groups, strict=True):
        size = math.prod(sizes[path])
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
            _number(group.get("lr")),
            _number(group.get("weight_decay")),
        ]
        for index, group in enumerate(groups)
    ]
    if tensors[-1]:
        rows.append(["frozen", "", str(tensors[-1]), f"{parameters[-1]:,}", "", ""])
    rows += [["none", f"{key} (matches nothing)", "0", "0", "", ""] for key in unmatched]
    return rows


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.6g}"
