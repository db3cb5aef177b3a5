"""A training state that stays in pieces between the calls of the step, since taking it apart costs more than a call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

PyTree = Any


class ResidentState(NamedTuple):
    """The leaves of a training state, as a compiled function takes them.

    Attributes:
      leaves: all but the key; keys among them as their data.
      rng: uint32[...], the data of the run's key, which no step changes.
      form: how to put them together.
    """

    leaves: list[jax.Array]
    rng: jax.Array
    form: "_Form"

    def whole(self) -> PyTree:
        """The training state."""
        return self.form.join(self.leaves, self.rng)


class _Form(NamedTuple):
    treedef: Any
    impls: tuple[Any, ...]  # the implementation of each leaf that is a key; the run's key is the last

    def join(self, leaves: Sequence[Any], rng: Any) -> PyTree:
        """The training state of these leaves."""
        whole = [
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip([*leaves, rng], self.impls, strict=True)
        ]
        return self.treedef.unflatten(whole)


def take_apart(state: PyTree) -> ResidentState:
    """A training state, whose last leaf is the run's key, in its pieces."""
    leaves, treedef = jax.tree.flatten(state)
    impls = tuple(jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves)
    *rest, rng = map(_data, leaves)
    return ResidentState(rest, rng, _Form(treedef, impls))


class ResidentStep:
    """A compiled training step that takes a state whole or in pieces, and leaves it in pieces.

    Keys travel as their data, which spares their wrapping at each call; that of the run goes in and does not come out.

    Args:
      step: pure, `(state, batch, hyperparams) -> (state, outputs)`, which leaves `state.rng` as it is.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._form: _Form | None = None
        self._compiled: Any

    def __call__(self, state: Any, batch: PyTree, hyperparams: PyTree) -> tuple[ResidentState, PyTree]:
        """Runs the step; the pieces of the state are donated, but for the run's key."""
        if type(state) is not ResidentState:
            state = take_apart(state)
        leaves, rng, form = state
        if form is not self._form:
            if form != self._form:
                self._compiled = jax.jit(functools.partial(self._on_pieces, form), donate_argnums=0)
            self._form = form
        leaves, outputs = self._compiled(leaves, rng, batch, hyperparams)
        return ResidentState(leaves, rng, form), outputs

    def trace(self, state: Any, batch: PyTree, hyperparams: PyTree) -> jax.stages.Traced:
        """The step as it was traced last, for arguments of these shapes; `state` is whole."""
        *leaves, rng = map(_data_shape, jax.tree.leaves(state))
        traced: jax.stages.Traced = self._compiled.trace(leaves, rng, batch, hyperparams)
        return traced

    def _on_pieces(self, form: _Form, leaves: list[Any], rng: Any, batch: PyTree, hyperparams: PyTree) -> Any:
        state, outputs = self._step(form.join(leaves, rng), batch, hyperparams)
        *rest, _ = map(_data, jax.tree.leaves(state))
        return rest, outputs


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _data_shape(leaf: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
