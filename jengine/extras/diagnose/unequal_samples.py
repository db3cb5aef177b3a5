"""Which samples of a batch cannot be stacked."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jengine.data.collate import is_numbers_in
from jengine.data.host_entries import Sample


def name_unequal_samples(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return the first sample with another structure or shape than sample 0. Explainer."""
    if "samples" not in context or not isinstance(error, ValueError):
        return None
    first, *others = map(_shapes, context["samples"])
    indices = context.get("indices")
    for index, shapes in enumerate(others, 1):
        for path in {**first, **shapes}:
            if first.get(path) != shapes.get(path):
                place = "" if indices is None else f", sample {indices[index]} of the dataset"
                return (
                    f"samples of a batch must have the same structure and shapes, got {path!r} of "
                    f"{first.get(path)} in sample 0 of the batch and of {shapes.get(path)} in "
                    f"sample {index}{place}; pad or crop it in the dataset, or set `collate_fn` "
                    "in the dataloader"
                )
    return None


def _shapes(sample: Sample) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(sample, is_leaf=is_numbers_in(sample))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf, object).shape
        for path, leaf in leaves
    }
