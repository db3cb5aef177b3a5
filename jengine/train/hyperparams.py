"""Hyperparameters by name, and as one array, which is one transfer per call."""

import dataclasses
import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.parallel.flat_state import FlatState

# an optax transformation may have no hyperparameters on the host
_NO_VALUES = np.empty(0, np.float32)
_ROWS = 64  # steps whose hyperparameters are sent together


class Hyperparams(dict[str, np.float32]):
    """Scalars by name, each stored as np.float32, so that a new value never causes a trace.

    >>> hyperparams = Hyperparams()
    >>> hyperparams["temperature"] = 1
    >>> hyperparams
    {'temperature': np.float32(1.0)}
    """

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a scalar; raise TypeError for anything else."""
        array = np.asarray(value)
        if array.size != 1 or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
            raise TypeError(f"the hyperparameter {name!r} must be a number, got {value!r}")
        # A scalar, not an array, which `hyperparams["x"] += 1` would modify while a dispatched step
        # still reads it
        super().__setitem__(name, np.float32(array.item()))

    def update(self, *values: Any, **named: Any) -> None:
        """Set several scalars; the method of dict would store them as they are."""
        for name, value in dict(*values, **named).items():
            self[name] = value

    def __ior__(self, values: Any) -> "Hyperparams":  # type: ignore[override, misc]
        self.update(values)
        return self

    def setdefault(self, name: str, value: Any) -> np.float32:
        """Set a scalar unless it is present, and return it."""
        if name not in self:
            self[name] = value
        return self[name]


@dataclasses.dataclass(frozen=True)
class _VectorSpec:
    """Structure of hyperparameters, with each leaf's shape and dtype."""

    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class HyperparamsVector:
    """Hyperparameters for a step, or for each step in a chunk, as one array."""

    # float[n]; float[K, n] for a chunk, and for the steps from `first` on
    vector: np.ndarray | jax.Array
    # the structure that `unravel` restores
    spec: _VectorSpec = dataclasses.field(metadata=dict(static=True))
    # arrays that `unravel` adds by name, on the devices; all steps of a chunk have the same
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # int32[], the counter of the step with the first row; None without rows
    first: np.ndarray | jax.Array | None = None

    def unravel(self, step: int | jax.Array) -> Any:
        """Return the arrays of a step in the original structure, within a compiled step."""
        vector = self.vector
        if self.first is not None:  # steps after the last row have that one
            vector = jax.lax.dynamic_index_in_dim(vector, step - self.first, keepdims=False)
        # Static slices of the one array that was transferred: XLA fuses them into their users.
        arrays = []
        start = 0
        for shape, dtype in self.spec.leaves:
            stop = start + math.prod(shape)
            arrays.append(vector[start:stop].reshape(shape).astype(dtype))
            start = stop
        values = self.spec.treedef.unflatten(arrays)
        if self.constants:
            values.update(self.constants)
        return values


class HyperparamsRaveler:
    """Builder of hyperparameter vectors, which share one spec, so that JAX compares it by identity.

    >>> raveler = HyperparamsRaveler()
    >>> first = raveler.ravel({"lr": np.float32(0.5), "betas": np.float32([0.9, 0.75])})
    >>> first.vector.tolist(), {name: value.tolist() for name, value in first.unravel(0).items()}
    ([0.8999999761581421, 0.75, 0.5], {'betas': [0.8999999761581421, 0.75], 'lr': 0.5})

    Args:
      constants: arrays on the devices, by name, which stay apart from the vector; see
        `HyperparamsVector`.
    """

    def __init__(self, constants: Mapping[str, Any] | None = None) -> None:
        self._constants: Mapping[str, Any] = {} if constants is None else constants
        self._leaves: list[np.ndarray | np.generic] = []
        self._are_numbers = False  # all leaves
        empty = _VectorSpec(jax.tree.structure({}), ())
        self._last = HyperparamsVector(_NO_VALUES, empty, self._constants)

    def _select_numbers(self, hyperparams: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._constants:
            return hyperparams
        return {name: x for name, x in hyperparams.items() if name not in self._constants}

    def ravel(self, hyperparams: Mapping[str, Any]) -> HyperparamsVector:
        """Return the host arrays of a step, by name or in nested containers, as one vector.

        A new value must be a new array: as long as all arrays are the same objects, the vector is
        the last one.
        """
        leaves, treedef = jax.tree.flatten(self._select_numbers(hyperparams))
        spec = self._last.spec
        is_known = len(leaves) == len(self._leaves) and treedef == spec.treedef
        # cheaper than to compare values
        if is_known and all(map(operator.is_, leaves, self._leaves)):
            return self._last
        if is_known and self._are_numbers:  # `np.concatenate` takes five times as long
            vector = np.array(leaves)
        else:
            vector = np.concatenate(leaves or [_NO_VALUES], axis=None)
        if not is_known or vector.size != self._last.vector.size:
            spec = _VectorSpec(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
            self._are_numbers = bool(leaves) and vector.size == len(leaves)
        self._leaves = leaves
        self._last = HyperparamsVector(vector, spec, self._constants)
        return self._last

    def stack(self, steps: Sequence[Mapping[str, Any]]) -> HyperparamsVector:
        """Return the hyperparameters of all steps in a chunk as one array, float[K, n].

        Raises:
          ValueError: a name was added or removed between two steps.
        """
        spec = self.ravel(steps[0]).spec
        # all at once, as a chunk may have hundreds of steps
        leaves, treedef = jax.tree.flatten(list(map(self._select_numbers, steps)))
        structures: Any = treedef
        if set(structures.children()) != {spec.treedef}:
            names = sorted({tuple(sorted(hyperparams)) for hyperparams in steps})
            raise ValueError(
                f"the steps of a chunk must have the same hyperparams, got {names}; set new ones "
                "before training, or in a hook that acts at each step"
            )
        vectors = np.concatenate(leaves or [_NO_VALUES], axis=None)
        vector = vectors.reshape(len(steps), self._last.vector.size)
        return HyperparamsVector(vector, spec, self._constants)


class SentHyperparams:
    """Hyperparameters on the devices, with those of the steps that follow.

    On an accelerator a transfer takes as long as a small step. So those that schedules know are
    sent ahead: none at first, and twice as many each time that all were right. Whatever turns out
    to be different is sent then.

    Args:
      put: host array -> array on the devices.
      read_ahead: `count -> float[k, n]`, at most `count` rows: of the step itself, and of those
        that follow.
    """

    def __init__(self, put: Callable[[Any], Any], read_ahead: Callable[[int], np.ndarray]) -> None:
        self._put = put
        self._read_ahead = read_ahead
        self._copy = jax.jit(lambda x: x + 0)  # an array that no step donates
        self._sent: HyperparamsVector | None = None
        self._rows: list[bytes] = []  # that were sent; the last ones are equal
        self._known = 1  # rows that are not the last one again
        self._age = 0  # steps since they were sent
        self._state: Callable[[], Any] = lambda: None

    def get(self, hyperparams: HyperparamsVector, state: FlatState) -> HyperparamsVector:
        """Return the hyperparameters of the step that follows as arrays on the devices."""
        row = np.asarray(hyperparams.vector)[None]
        values = row.tobytes()
        sent = self._sent
        # in another state the counter, by which the step finds its row, may be any
        follows = self._state() is state
        age = self._age = self._age + 1
        if (
            sent is not None
            and sent.spec is hyperparams.spec
            and self._rows[min(age, _ROWS - 1)] == values
            and (follows or self._known == 1)
        ):
            return sent
        count = min(2 * self._known, _ROWS) if follows and age >= self._known else 1
        ahead = self._read_ahead(count) if count > 1 else row
        if ahead[0].tobytes() != values:  # a caller may pass others than those of the optimizer
            ahead = row
        block = repeat_last(hyperparams, ahead)
        self._known = len(ahead)
        self._age = 0
        self._rows = [each.tobytes() for each in block.vector]
        first = self._copy(state.unflatten().step) if sent is None or count > 1 else sent.first
        self._sent = dataclasses.replace(block, vector=self._put(block.vector), first=first)
        return self._sent

    def follow(self, state: FlatState) -> None:
        """Expect a state, which the step has returned, in the next call."""
        self._state = weakref.ref(state)


def repeat_last(hyperparams: HyperparamsVector, rows: np.ndarray) -> HyperparamsVector:
    """Return the hyperparameters of as many steps as are sent together, the last row repeated."""
    repeated = np.repeat(rows[-1:], _ROWS - len(rows), axis=0)
    vector = np.concatenate([rows, repeated])
    return dataclasses.replace(hyperparams, vector=vector, first=np.zeros((), np.int32))
