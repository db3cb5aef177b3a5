"""A training state that stays in pieces between the calls of the step, since taking it apart costs more than a call."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.apart import set_apart
from jengine.packed import Layout, Packed, Place, pack, pack_as, take, unpack

PyTree = Any

_SMALL = 2**13  # bytes of a leaf up to which two copies of it take less time than an argument more
_GROUP = 4


class ResidentState(NamedTuple):
    """The leaves of a training state, as a compiled function takes them.

    Attributes:
      leaves: all but the counters and the key; keys among them as their data. `ResidentRows` has them as a pair: the
        small ones packed, in an array for each dtype, and the others.
      counters: int32[n], those leaves that are single integers; for each array more a call takes a microsecond longer.
      rng: uint32[...], the data of the run's key, which no step changes.
      form: how to put them together.
    """

    leaves: Any
    counters: jax.Array
    rng: jax.Array
    form: "_Form"

    def whole(self) -> PyTree:
        """The training state."""
        return self.form.join(self.unpacked().leaves, _single(self.counters), self.rng)

    def packed(self) -> "ResidentState":
        """With the small leaves packed, which are taken away."""
        if self.form.layout is not None:
            return self
        small = [leaf.nbytes <= _SMALL for leaf in self.leaves]
        leaves = [np.asarray(leaf) if packs else leaf for leaf, packs in zip(self.leaves, small, strict=True)]
        packed = pack(leaves, jax.tree.structure(leaves))
        arrays = tuple(_put_beside(self.counters, packed.arrays))
        for leaf in itertools.compress(self.leaves, small):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        return self._replace(leaves=(arrays, packed.rest), form=self.form._replace(layout=packed.layout))

    def unpacked(self) -> "ResidentState":
        """With no leaf packed."""
        if self.form.layout is None:
            return self
        arrays, rest = self.leaves
        parts = functools.partial(_take_copies, self.counters)
        return self._replace(leaves=self.form.unpack(arrays, rest, parts), form=self.form._replace(layout=None))


class _Form(NamedTuple):
    treedef: Any
    impls: tuple[Any, ...]  # the implementation of each leaf that is a key; the run's key is the last
    counting: tuple[bool, ...]  # which leaves are counters
    layout: Layout | None = None  # of the leaves, where small ones are packed

    @classmethod
    def of(cls, state: PyTree) -> "_Form":
        """That of a training state whose last leaf is the run's key."""
        leaves, treedef = jax.tree.flatten(state)
        impls = tuple(jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves)
        return cls(treedef, impls, tuple(leaf.shape == () and leaf.dtype == np.int32 for leaf in leaves))

    def split(self, state: PyTree) -> tuple[list[Any], list[Any], Any]:
        """The leaves, the counters one by one, and the run's key."""
        leaves = jax.tree.leaves(state)
        *others, rng = [leaf for leaf, counts in zip(leaves, self.counting, strict=True) if not counts]
        return others, [leaf for leaf, counts in zip(leaves, self.counting, strict=True) if counts], rng

    def join(self, leaves: Sequence[Any], counters: Sequence[Any], rng: Any) -> PyTree:
        """The training state of these leaves, whose keys are data."""
        others, counts = iter([*leaves, rng]), iter(counters)
        whole = [next(counts if counting else others) for counting in self.counting]
        keyed = [
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(whole, self.impls, strict=True)
        ]
        return self.treedef.unflatten(keyed)

    def unpack(self, arrays: Sequence[Any], rest: Sequence[Any], take: Callable[..., Any]) -> list[Any]:
        """The leaves, of which small ones are packed in `arrays`; `take` as `jengine.packed.unpack` has it."""
        assert self.layout is not None
        leaves: list[Any] = unpack(Packed(tuple(arrays), tuple(rest), self.layout), take)
        return leaves


def take_apart(state: PyTree) -> ResidentState:
    """A training state, whose last leaf is the run's key, in its pieces."""
    form = _Form.of(state)
    leaves, counters, rng = form.split(state)
    return ResidentState(list(map(_data, leaves)), _gathered(counters), _data(rng), form)


def _gathered(counters: Sequence[jax.Array]) -> jax.Array:
    """As `_vector`, outside of a program; the host does it on a CPU, in less time than the program takes to compile."""
    if counters and next(iter(counters[0].devices())).platform == "cpu":
        return _put_beside(counters[0], [np.stack([np.asarray(counter) for counter in counters])])[0]
    return _vector(counters)


@jax.jit
def _vector(counters: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(counters) if counters else jnp.zeros((0,), jnp.int32)


@jax.jit
def _single(counters: jax.Array) -> list[jax.Array]:
    return [jax.lax.index_in_dim(counters, i, keepdims=False) for i in range(len(counters))]


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
        leaves, counters, rng, form = self._pieces(state)
        leaves, counters, outputs = self._compiled(leaves, counters, rng, batch, hyperparams)
        return ResidentState(leaves, counters, rng, form), outputs

    def trace(self, state: Any, batch: PyTree, hyperparams: PyTree) -> jax.stages.Traced:
        """The step as a call with arguments of these shapes traces it; `state` is whole."""
        if self._form is None:
            jax.eval_shape(self._take_form, state)
        assert self._form is not None
        leaves, counters, rng = self._form.split(state)
        shapes = list(map(_data_shape, leaves)), _vector_shape(counters), _data_shape(rng)
        traced: jax.stages.Traced = self._compiled.trace(*shapes, batch, hyperparams)
        return traced

    def _pieces(self, state: Any) -> ResidentState:
        """The state in pieces, for which `_compiled` is then the program."""
        state = self._as_taken(state if type(state) is ResidentState else take_apart(state))
        if state.form is not self._form:
            self._take(state.form)
        return state

    def _take_form(self, state: PyTree) -> None:
        self._take(_Form.of(state))

    def _take(self, form: _Form) -> None:
        if form != self._form:
            self._compiled = self._compile(form)
        self._form = form

    def _as_taken(self, state: ResidentState) -> ResidentState:
        return state.unpacked()

    def _compile(self, form: _Form) -> Any:
        return jax.jit(functools.partial(_on_pieces, self._step, form), donate_argnums=(0, 1))


class InterruptedRowsError(Exception):
    """One of several steps has failed.

    Attributes:
      done: how many steps came before it.
      outputs: theirs.
    """

    def __init__(self, done: int, outputs: PyTree) -> None:
        super().__init__(f"the step after {done} of those that were sent together has failed")
        self.done = done
        self.outputs = outputs


class ResidentRows(ResidentStep):
    """Several compiled training steps with a call for each, whose inputs go to the device together before the first.

    Small leaves of the state lie packed: a call takes a microsecond longer for each array more.

    Args:
      step: pure, `(state, batches, rows) -> (state, outputs)`; see `jengine.train.window.RowStep`.
      outputs: the form of an output of all steps, [size], by name.
      device: where they run.
    """

    def __init__(self, step: Callable[..., Any], outputs: Mapping[str, jax.ShapeDtypeStruct], device: Any) -> None:
        super().__init__(step)
        size = next(iter(outputs.values())).shape[0]

        @jax.jit
        def begin(batches: PyTree, hyperparams: PyTree) -> PyTree:
            """The inputs, and empty outputs; to copy each input by itself takes three times as long."""
            empty = {name: jnp.zeros(like.shape, like.dtype) for name, like in outputs.items()}
            return *jax.tree.map(jnp.copy, (batches, hyperparams)), empty

        self._begin = begin
        self._device = device
        with jax.default_device(device):
            self._rows = [jnp.asarray(np.int32(row)) for row in range(size)]

    def run(self, state: Any, batches: PyTree, hyperparams: PyTree, count: int) -> tuple[ResidentState, PyTree]:
        """Runs the first `count` steps; the pieces of the state are donated, but for the run's key.

        Returns:
          The state after the last, and the outputs of all; what follows the first `count` means nothing.

        Raises:
          InterruptedRowsError: one of them fails, with the error as the cause.
        """
        leaves, counters, rng, form = self._pieces(state)
        with jax.default_device(self._device):
            batches, hyperparams, outputs = self._begin(batches, hyperparams)
        compiled, done = self._compiled, 0
        try:
            for done, row in enumerate(self._rows[:count]):  # noqa: B007 - read where one fails
                leaves, counters, outputs = compiled(leaves, counters, rng, outputs, batches, hyperparams, row)
        except Exception as error:
            raise InterruptedRowsError(done, outputs) from error
        return ResidentState(leaves, counters, rng, form), outputs

    def _as_taken(self, state: ResidentState) -> ResidentState:
        return state.packed()

    def _compile(self, form: _Form) -> Any:
        # the step is as it is by itself, and what is around it set apart: what XLA joins decides on last bits
        assert form.layout is not None
        pack_again = set_apart(functools.partial(pack_as, layout=form.layout))

        def run(
            leaves: Any, counters: Any, rng: Any, outputs: PyTree, batches: PyTree, hyperparams: PyTree, row: Any
        ) -> Any:
            """One of the steps."""
            rows = {"hyperparams": hyperparams, "outputs": outputs, "row": row}
            arrays, rest = leaves
            whole = form.unpack(arrays, rest, _take_in_groups)
            whole, counters, outputs = _on_pieces(self._step, form, whole, counters, rng, batches, rows)
            packed = pack_again(whole)
            return (packed.arrays, packed.rest), counters, outputs

        return jax.jit(run, donate_argnums=(0, 1))  # the outputs are of interest where a later step fails


def _on_pieces(
    step: Callable[..., Any], form: _Form, leaves: list[Any], counters: Any, rng: Any, *inputs: PyTree
) -> Any:
    state, outputs = step(form.join(leaves, _single(counters), rng), *inputs)
    leaves, counts, _ = form.split(state)
    return list(map(_data, leaves)), _vector(counts), outputs


def _take_in_groups(arrays: Sequence[jax.Array], places: Sequence[Place]) -> list[jax.Array]:
    """As `take`, in calls of a few leaves each: XLA runs these in one thread, and to pass them on takes it longer."""
    leaves: list[jax.Array] = []
    for i in range(0, len(places), _GROUP):
        leaves += set_apart(functools.partial(take, places=places[i : i + _GROUP]))(arrays)
    return leaves


def _take_copies(beside: jax.Array, arrays: Sequence[jax.Array], places: Sequence[Place]) -> list[jax.Array]:
    """As `take`, of arrays on a CPU, as arrays of their own that lie where another does."""
    return _put_beside(beside, [part.copy() for part in take(list(map(np.asarray, arrays)), places)])


def _put_beside(other: jax.Array, values: Sequence[np.ndarray]) -> list[jax.Array]:
    """Sends arrays to the device of another, tied to it if the other is."""
    if other.committed:
        return jax.device_put(list(values), other.sharding)
    with jax.default_device(next(iter(other.devices()))):
        return jax.device_put(list(values))


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _data_shape(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    return _lying(jax.eval_shape(jax.random.key_data, leaf), leaf)


def _vector_shape(counters: Sequence[Any]) -> jax.ShapeDtypeStruct:
    shape = jax.eval_shape(_vector, counters)
    return _lying(shape, counters[0]) if counters else shape


def _lying(shape: jax.ShapeDtypeStruct, beside: Any) -> jax.ShapeDtypeStruct:
    """The shape of what lies where another does."""
    return shape.update(sharding=beside.sharding)
