"""Hyperparameters of the step: scalars that hooks set, and all of them as one vector for the compiled step."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np


class Hyperparams(dict[str, np.float32]):
    """A dict of scalars by name, each stored as np.float32: of one dtype, so that a new value never causes a trace.

    They are scalars, not arrays, which `hyperparams["x"] += 1` would modify while a dispatched step still reads them.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a scalar.

        Raises:
          TypeError: `value` is not one number.
        """
        array = np.asarray(value)
        if array.size != 1 or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
            raise TypeError(f"the hyperparameter {name!r} is one number, found {value!r}")
        super().__setitem__(name, np.float32(array.item()))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlatHyperparams:
    """Hyperparameters of a step, or of each step of a chunk, as one array: each further array costs a transfer a call.

    Attributes:
      vector: float[n]; float[K, n] for a chunk.
      treedef: structure of the dict.
      leaves: shape and dtype of each of its leaves.
    """

    vector: Any
    treedef: Any = dataclasses.field(metadata=dict(static=True))
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...] = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def ravel(cls, hyperparams: Mapping[str, Any]) -> "FlatHyperparams":
        """Concatenate host arrays, by name or in nested containers."""
        leaves, treedef = jax.tree.flatten(hyperparams)
        vector = np.concatenate([np.ravel(leaf) for leaf in leaves])
        return cls(vector, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    @classmethod
    def stack(cls, steps: Sequence["FlatHyperparams"]) -> "FlatHyperparams":
        """Stack the hyperparameters of the steps of a chunk.

        Raises:
          ValueError: a name was added or removed between two steps.
        """
        first = steps[0]
        for other in steps[1:]:
            if (other.treedef, other.leaves) != (first.treedef, first.leaves):
                raise ValueError(
                    f"the steps of a chunk need the same hyperparams, found {first.treedef} and then {other.treedef}: "
                    "set new ones before training, or in a hook that acts at each step"
                )
        return dataclasses.replace(first, vector=np.stack([step.vector for step in steps]))

    def unravel(self) -> Any:
        """Return the arrays in their containers, within a compiled step."""
        arrays, start = [], 0
        for shape, dtype in self.leaves:
            stop = start + math.prod(shape)
            arrays.append(self.vector[start:stop].reshape(shape).astype(dtype))
            start = stop
        return self.treedef.unflatten(arrays)
