"""Hold the hyperparameters of the step: scalars that hooks set, and all of them as one vector for the compiled step."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

_NOTHING = np.empty(0, np.float32)  # an optax transformation may keep all its numbers to itself


class Hyperparams(dict[str, np.float32]):
    """Map names to scalars, each stored as np.float32, so that a new value never causes a trace.

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


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Describe the structure of hyperparameters, and shape and dtype of each leaf."""

    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class FlatHyperparams:
    """Hold the hyperparameters of a step, or of each step of a chunk, as one array: each array costs a transfer a call.

    Attributes:
      vector: float[n]; float[K, n] for a chunk.
      layout: static; the structure that `unravel` restores.
    """

    vector: Any
    layout: _Layout = dataclasses.field(metadata=dict(static=True))

    def unravel(self) -> Any:
        """Return the arrays in their containers, within a compiled step."""
        arrays, start = [], 0
        for shape, dtype in self.layout.leaves:
            stop = start + math.prod(shape)
            arrays.append(self.vector[start:stop].reshape(shape).astype(dtype))
            start = stop
        return self.layout.treedef.unflatten(arrays)


class Raveler:
    """Concatenate the hyperparameters of steps; the layout is shared, so that JAX compares it by identity."""

    def __init__(self) -> None:
        self._layout: _Layout | None = None
        self._size = 0

    def __call__(self, hyperparams: Mapping[str, Any]) -> FlatHyperparams:
        """Return the host arrays of a step, by name or in nested containers, as one array."""
        leaves, treedef = jax.tree.flatten(hyperparams)
        vector = np.concatenate(leaves or [_NOTHING], axis=None)
        if self._layout is None or treedef != self._layout.treedef or vector.size != self._size:
            self._layout = _Layout(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
            self._size = vector.size
        return FlatHyperparams(vector, self._layout)

    def stack(self, steps: Sequence[Mapping[str, Any]]) -> FlatHyperparams:
        """Return the hyperparameters of the steps of a chunk as one array, float[K, n].

        Raises:
          ValueError: a name was added or removed between two steps.
        """
        layout = self(steps[0]).layout
        flat = [jax.tree.flatten(hyperparams) for hyperparams in steps]
        if any(treedef != layout.treedef for _, treedef in flat):
            names = sorted({tuple(sorted(hyperparams)) for hyperparams in steps})
            raise ValueError(
                f"the steps of a chunk need the same hyperparams, found {names}: set new ones before training, or in a "
                "hook that acts at each step"
            )
        rows = np.concatenate([leaf for leaves, _ in flat for leaf in leaves] or [_NOTHING], axis=None)
        return FlatHyperparams(rows.reshape(len(steps), -1), layout)
