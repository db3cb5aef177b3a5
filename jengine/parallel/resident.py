"""A training state that stays in pieces between the calls of the step, since taking it apart costs more than a call."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from jengine.packed import Layout, Packed, Place, pack_on_device, take_on_device, unpack

PyTree = Any

_GROUP = 4


class ResidentState(NamedTuple):
    """The leaves of a training state, as a compiled function takes them.

    Attributes:
      packed: the small leaves, in an array for each dtype; for each array more a call takes a microsecond longer.
      leaves: the others; keys among them as their data.
      rng: uint32[...], the data of the run's key, which no step changes.
      form: how to put them together.
    """

    packed: tuple[jax.Array, ...]
    leaves: list[jax.Array]
    rng: jax.Array
    form: "Form"

    def whole(self) -> PyTree:
        """The training state."""
        return self.form.join(self.packed, self.leaves, self.rng)


class Form(NamedTuple):
    """How a training state, whose last leaf is the run's key, lies in pieces.

    Attributes:
      layout: of its leaves, packed and not.
      impls: the implementation of each leaf that is a key, None for the others.
    """

    layout: Layout
    impls: tuple[Any, ...]

    @classmethod
    def of(cls, state: PyTree, small: int) -> "Form":
        """That of a state, of which counters and leaves of at most `small` bytes are packed."""
        leaves, treedef = jax.tree.flatten(state)
        impls = tuple(jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves)
        return cls(Layout.of(leaves, treedef, lambda leaf: _is_packed(leaf, small)), impls)

    def split(self, state: PyTree) -> ResidentState:
        """The pieces of a state."""
        leaves = list(map(_data, jax.tree.leaves(state)))
        *others, rng = [leaf for leaf, place in zip(leaves, self.layout.places, strict=True) if place is None]
        return ResidentState(pack_on_device(leaves, self.layout), others, rng, self)

    def join(
        self, packed: Sequence[Any], leaves: Sequence[Any], rng: Any, take: Callable[..., Any] = take_on_device
    ) -> PyTree:
        """The state of these pieces; `take` as `unpack` has it."""
        impls = [impl for impl, place in zip(self.impls, self.layout.places, strict=True) if place is None]
        others = [
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip([*leaves, rng], impls, strict=True)
        ]
        return unpack(Packed(tuple(packed), tuple(others), self.layout), take)


class ResidentStep:
    """A compiled training step that takes a state whole or in pieces, and leaves it in pieces.

    Keys travel as their data, which spares their wrapping at each call; that of the run goes in and does not come out.

    Args:
      step: pure, `(state, batch, hyperparams) -> (state, outputs)`, which leaves `state.rng` as it is.
      small: leaves of at most so many bytes are packed, beside the counters. Each costs two copies.
    """

    def __init__(self, step: Callable[..., Any], small: int) -> None:
        self._step = step
        self._small = small
        self._form: Form | None = None
        self._compiled: Any

    def __call__(self, state: Any, batch: PyTree, hyperparams: PyTree) -> tuple[ResidentState, PyTree]:
        """Runs the step; the pieces of the state are donated, but for the run's key."""
        packed, leaves, rng, form = self._pieces(state)
        packed, leaves, outputs = self._compiled(packed, leaves, rng, batch, hyperparams)
        _take_away(state)
        return ResidentState(packed, leaves, rng, form), outputs

    def trace(self, state: Any, batch: PyTree, hyperparams: PyTree) -> jax.stages.Traced:
        """The step as it was traced last, for arguments of these shapes; `state` is whole."""
        form = self._form
        assert form is not None
        pieces = jax.eval_shape(lambda state: form.split(state)[:3], state)
        traced: jax.stages.Traced = self._compiled.trace(*pieces, batch, hyperparams)
        return traced

    def _pieces(self, state: Any) -> ResidentState:
        """The state in pieces, for which `_compiled` is then the program."""
        if type(state) is not ResidentState:
            state = Form.of(state, self._small).split(state)
        if state.form is not self._form:
            if state.form != self._form:
                self._compiled = self._compile(self._on_pieces(state.form))
            self._form = state.form
        return state

    def _on_pieces(self, form: Form) -> Callable[..., Any]:
        """The step on pieces of that form: `(packed, leaves, rng, *inputs) -> (packed, leaves, outputs)`."""

        # what XLA puts into one kernel decides on last bits: so the step is the same whatever is around it
        step, take = (_set_apart(self._step), _take_in_groups) if self._small else (self._step, take_on_device)

        def run(packed: Sequence[Any], leaves: Sequence[Any], rng: Any, *inputs: PyTree) -> Any:
            state, outputs = step(form.join(packed, leaves, rng, take), *inputs)
            packed, leaves, *_ = form.split(state)
            return packed, leaves, outputs

        return run

    def _compile(self, step: Callable[..., Any]) -> Any:
        return jax.jit(step, donate_argnums=(0, 1))


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

    Args:
      step: pure, `(state, batches, rows) -> (state, outputs)`; see `jengine.train.window.RowStep`.
      small: as `ResidentStep` has it.
      outputs: the form of an output of all steps, [size], by name.
      device: where they run.
    """

    def __init__(
        self, step: Callable[..., Any], small: int, outputs: Mapping[str, jax.ShapeDtypeStruct], device: Any
    ) -> None:
        super().__init__(step, small)
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
        packed, leaves, rng, form = self._pieces(state)
        with jax.default_device(self._device):
            batches, hyperparams, outputs = self._begin(batches, hyperparams)
        compiled, done = self._compiled, 0
        try:
            for done, row in enumerate(self._rows[:count]):  # noqa: B007 - read where one fails
                packed, leaves, outputs = compiled(packed, leaves, rng, outputs, batches, hyperparams, row)
        except Exception as error:
            raise InterruptedRowsError(done, outputs) from error
        _take_away(state)
        return ResidentState(packed, leaves, rng, form), outputs

    def _compile(self, step: Callable[..., Any]) -> Any:
        def run(
            packed: Any, leaves: Any, rng: Any, outputs: PyTree, batches: PyTree, hyperparams: PyTree, row: Any
        ) -> Any:
            rows = {"hyperparams": hyperparams, "outputs": outputs, "row": row}
            return step(packed, leaves, rng, batches, rows)

        return jax.jit(run, donate_argnums=(0, 1))  # the outputs are of interest where a later step fails


def _set_apart(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a call of its own within what is compiled: XLA joins no operation in it with one outside."""

    def call(*args: PyTree) -> Any:
        return set_xla_metadata(jax.jit(fn)(*args), inlineable="false")  # marks the call that these come from

    return call


def _take_in_groups(arrays: Sequence[jax.Array], places: Sequence[Place]) -> list[jax.Array]:
    """As `take_on_device`, in calls of a few leaves each, which XLA runs in a thread: between threads it loses more time."""
    leaves = []
    for i in range(0, len(places), _GROUP):
        leaves += _set_apart(functools.partial(take_on_device, places=places[i : i + _GROUP]))(arrays)
    return leaves


def _take_away(state: Any) -> None:
    """Deletes a whole state but for the run's key: those of its leaves that were packed were not donated."""
    if type(state) is not ResidentState:
        for leaf in jax.tree.leaves(state)[:-1]:
            if isinstance(leaf, jax.Array):
                leaf.delete()


def _is_packed(leaf: Any, small: int) -> bool:
    counts = leaf.shape == () and leaf.dtype == np.int32
    return counts or (not _is_key(leaf) and leaf.size * leaf.dtype.itemsize <= small)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
