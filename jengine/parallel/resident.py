"""A training state that stays between calls as the compiled step takes it: taking it apart costs more than a call.

Each array that goes into a call of a compiled function, or comes out, costs the host about a microsecond, however
small it is. So the small ones of a state may travel together, in one array for each dtype.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any

_SMALL = 1024  # elements up to which copying an array costs less than handing it over
# XLA's CPU compiler computes the arrays within the loop that puts up to eight of them together, and rounds otherwise
# then. Of more it makes copies of what it computes as it would without.
_LEAST = 9


class ResidentState(NamedTuple):
    """The arrays of a training state, as a compiled function takes them.

    Attributes:
      arrays: all but the key; keys among them as their data.
      rng: uint32[...], the data of the run's key, which no step changes.
      form: how to put them together.
    """

    arrays: list[jax.Array]
    rng: jax.Array
    form: "_Form"

    def whole(self) -> PyTree:
        """The training state."""
        device = next(iter(self.rng.devices()))
        parts = {at: np.asarray(self.arrays[at]) for at in self.form.packs}  # compiles nothing
        leaves = self.form.spread([parts.get(at, array) for at, array in enumerate(self.arrays)])
        return self.form.join(jax.device_put(leaves, device) if parts else leaves, self.rng)

    def shape(self) -> PyTree:
        """The training state with the shapes of what travels together in the place of arrays, also if it is gone."""
        leaves: dict[int, Any] = dict(zip(self.form.alone, self.arrays, strict=False))
        for at, members in zip(self.form.packs, self.form.together, strict=True):
            for i in members:
                leaves[i] = jax.ShapeDtypeStruct(
                    self.form.shapes[i], self.arrays[at].dtype, sharding=self.arrays[at].sharding
                )
        return self.form.join([leaves[i] for i in range(len(leaves))], self.rng)

    def is_deleted(self) -> bool:
        """Whether a call has taken it."""
        return any(array.is_deleted() for array in self.arrays)


class _Form(NamedTuple):
    """How a state consists of arrays."""

    treedef: Any
    impls: tuple[Any, ...]  # the implementation of each leaf that is a key; the run's key is the last
    shapes: tuple[tuple[int, ...], ...]  # of the leaves but the last
    alone: tuple[int, ...]  # the leaves that have an array of their own
    together: tuple[tuple[int, ...], ...]  # the leaves of each array that holds several

    @property
    def packs(self) -> range:
        """Which of the arrays hold several leaves."""
        return range(len(self.alone), len(self.alone) + len(self.together))

    def gather(self, leaves: Sequence[Any], np: Any = jnp) -> list[Any]:
        """The arrays that hold these leaves; `np` is the library that puts them together."""
        arrays = [leaves[i] for i in self.alone]
        for members in self.together:
            parts = [np.ravel(leaves[i]) for i in members]
            fill = [np.zeros((1,), parts[0].dtype)] * (_LEAST - len(parts))
            arrays.append(np.concatenate([*parts, *fill]))
        return arrays

    def spread(self, arrays: Sequence[Any]) -> list[Any]:
        """The leaves in these arrays."""
        leaves: dict[int, Any] = dict(zip(self.alone, arrays, strict=False))
        for members, array in zip(self.together, arrays[len(self.alone) :], strict=True):
            start = 0
            for i in members:
                end = start + math.prod(self.shapes[i])
                leaves[i] = array[start:end].reshape(self.shapes[i])
                start = end
        return [leaves[i] for i in range(len(leaves))]

    def join(self, leaves: Sequence[Any], rng: Any) -> PyTree:
        """The training state of these leaves."""
        whole = [
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip([*leaves, rng], self.impls, strict=True)
        ]
        return self.treedef.unflatten(whole)


def take_apart(state: PyTree, pack: bool = False) -> ResidentState:
    """The arrays of a training state, whose last leaf is the run's key; with `pack` small ones together."""
    leaves, treedef = jax.tree.flatten(state)
    impls = tuple(jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves)
    *rest, rng = map(_data, leaves)
    small: dict[Any, list[int]] = {}
    for i, leaf in enumerate(rest):
        if pack and impls[i] is None and leaf.size <= _SMALL:
            small.setdefault(leaf.dtype, []).append(i)
    together = tuple(tuple(members) for members in small.values() if len(members) > 1)
    packed = {i for members in together for i in members}
    alone = tuple(i for i in range(len(rest)) if i not in packed)
    form = _Form(treedef, impls, tuple(leaf.shape for leaf in rest), alone, together)
    if not packed:
        return ResidentState(rest, rng, form)
    arrays = form.gather([np.asarray(leaf) if i in packed else leaf for i, leaf in enumerate(rest)], np)
    return ResidentState(jax.device_put(arrays, next(iter(rng.devices()))), rng, form)


class ResidentStep:
    """A compiled training step that takes a state whole or in its arrays, and leaves it in its arrays.

    Keys travel as their data, which spares their wrapping at each call; that of the run goes in and does not come out.

    Args:
      step: pure, `(state, batch, hyperparams) -> (state, outputs)`, which leaves `state.rng` as it is.
      pack: small arrays of the state travel together; what the step computes stays the same.
    """

    def __init__(self, step: Callable[..., Any], pack: bool = False) -> None:
        self._step = step
        self._pack = pack
        self._form: _Form | None = None
        self._compiled: Any

    def __call__(self, state: Any, batch: PyTree, hyperparams: PyTree) -> tuple[ResidentState, PyTree]:
        """Runs the step; the arrays of the state are donated, but for the run's key and what is copied to be packed."""
        if type(state) is not ResidentState:
            state = take_apart(state, self._pack)
        arrays, rng, form = state
        if form is not self._form:
            if form != self._form:
                self._compiled = jax.jit(functools.partial(self._on_arrays, form), donate_argnums=0)
            self._form = form
        arrays, outputs = self._compiled(arrays, rng, batch, hyperparams)
        return ResidentState(arrays, rng, form), outputs

    def trace(self, state: Any, batch: PyTree, hyperparams: PyTree) -> jax.stages.Traced:
        """The step as it was traced last, for arguments of these shapes; `state` is whole."""
        assert self._form is not None
        *leaves, rng = map(_data_shape, jax.tree.leaves(state))
        arrays = jax.eval_shape(self._form.gather, leaves)
        traced: jax.stages.Traced = self._compiled.trace(arrays, rng, batch, hyperparams)
        return traced

    def _on_arrays(self, form: _Form, arrays: list[Any], rng: Any, batch: PyTree, hyperparams: PyTree) -> Any:
        state, outputs = self._step(form.join(form.spread(arrays), rng), batch, hyperparams)
        *leaves, _ = map(_data, jax.tree.leaves(state))
        return form.gather(leaves), outputs


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _data_shape(leaf: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
