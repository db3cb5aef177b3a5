"""Hold the hyperparameters of the step: scalars that hooks set, and all of them as one vector for the compiled step."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

_NO_VALUES = np.empty(0, np.float32)  # for an optax transformation without hyperparameters of the host


class Hyperparams(dict[str, np.float32]):
    """Map names to scalars, each stored as np.float32, so that a new value never causes a trace.

    They are scalars, not arrays, which `hyperparams["x"] += 1` would modify while a dispatched step still reads them.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a scalar.

        Raises:
          TypeError: `value` is not a number.
        """
        array = np.asarray(value)
        if array.size != 1 or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
            raise TypeError(f"the hyperparameter {name!r} must be a number, got {value!r}")
        super().__setitem__(name, np.float32(array.item()))


@dataclasses.dataclass(frozen=True)
class _VectorSpec:
    """Describe the structure of hyperparameters, and the shape and dtype of each leaf."""

    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class HyperparamsVector:
    """Hold the hyperparameters of a step, or of each step of a chunk, as one array: one transfer for each call.

    Attributes:
      vector: float[n]; float[K, n] for a chunk.
      spec: static; the structure that `unravel` restores.
    """

    vector: Any
    spec: _VectorSpec = dataclasses.field(metadata=dict(static=True))

    def unravel(self) -> Any:
        """Return the arrays in their original structure, within a compiled step."""
        arrays, start = [], 0
        for shape, dtype in self.spec.leaves:
            stop = start + math.prod(shape)
            arrays.append(self.vector[start:stop].reshape(shape).astype(dtype))
            start = stop
        return self.spec.treedef.unflatten(arrays)


class HyperparamsRaveler:
    """Concatenate the hyperparameters of steps; vectors share one spec, so that JAX compares it by identity."""

    def __init__(self) -> None:
        self._spec: _VectorSpec | None = None
        self._size = 0

    def ravel(self, hyperparams: Mapping[str, Any]) -> HyperparamsVector:
        """Return the host arrays of a step, by name or in nested containers, as one vector."""
        leaves, treedef = jax.tree.flatten(hyperparams)
        vector = np.concatenate(leaves or [_NO_VALUES], axis=None)
        if self._spec is None or treedef != self._spec.treedef or vector.size != self._size:
            self._spec = _VectorSpec(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
            self._size = vector.size
        return HyperparamsVector(vector, self._spec)

    def stack(self, steps: Sequence[Mapping[str, Any]]) -> HyperparamsVector:
        """Return the hyperparameters of the steps of a chunk as one array, float[K, n].

        Raises:
          ValueError: a name was added or removed between two steps.
        """
        spec = self.ravel(steps[0]).spec
        flat = [jax.tree.flatten(hyperparams) for hyperparams in steps]
        if any(treedef != spec.treedef for _, treedef in flat):
            names = sorted({tuple(sorted(hyperparams)) for hyperparams in steps})
            raise ValueError(
                f"the steps of a chunk must have the same hyperparams, got {names}; set new ones before training, or "
                "in a hook that acts at each step"
            )
        vectors = np.concatenate([leaf for leaves, _ in flat for leaf in leaves] or [_NO_VALUES], axis=None)
        return HyperparamsVector(vectors.reshape(len(steps), -1), spec)
