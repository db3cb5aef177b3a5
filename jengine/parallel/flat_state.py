"""Training state as the tuple of its arrays, and compiled steps that take it.

A call of a compiled step with the tree of a small state takes 30 us; with the tuple it takes 20.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class FlatState:
    """Training state as the tuple of its arrays.

    >>> flatten_state({"w": 1.0, "b": 0.5}).leaves
    (0.5, 1.0)
    """

    leaves: tuple[Any, ...]
    structure: Any = dataclasses.field(metadata=dict(static=True))  # jax.tree_util.PyTreeDef

    def unflatten(self) -> Any:
        """Return the tree."""
        return self.structure.unflatten(self.leaves)


def flatten_state(state: PyTree) -> FlatState:
    """Return a training state, or a tree like it, as the tuple of its leaves."""
    leaves, structure = jax.tree.flatten(state)
    return FlatState(tuple(leaves), structure)


class StepProgram:
    """Compiled training step, whose state is donated.

    >>> program = StepProgram(lambda state, batch, inputs: (state + batch, {}))
    >>> program(jax.numpy.float32(1), 2.0, {})
    (Array(3., dtype=float32), {})

    Args:
      step: `(state, batch, inputs) -> (state, outputs)`.
      in_state: shardings for the state that it takes; None for those that the arrays have.
      out: shardings for the state and the outputs that it returns; None for those that XLA chooses.

    Attributes:
      flat: the same with a `FlatState` as the state that it takes and returns.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        in_state: PyTree = None,
        out: tuple[PyTree, PyTree] | None = None,
    ) -> None:
        @functools.wraps(step)
        def run(state: FlatState, *inputs: Any) -> tuple[FlatState, Any]:
            new_state, outputs = step(state.unflatten(), *inputs)
            return flatten_state(new_state), outputs

        shardings: dict[str, Any] = {}
        if in_state is not None:
            shardings["in_shardings"] = (flatten_state(in_state), None, None)
        if out is not None:
            shardings["out_shardings"] = (flatten_state(out[0]), out[1])
        self.flat = jax.jit(run, donate_argnums=0, **shardings)

    def __call__(self, state: PyTree, *inputs: Any) -> tuple[PyTree, Any]:
        """Run the step."""
        new_state, outputs = self.flat(flatten_state(state), *inputs)
        return new_state.unflatten(), outputs

    def trace(self, state: PyTree, *inputs: Any) -> jax.stages.Traced:
        """Trace the step; the arguments may be `jax.ShapeDtypeStruct`s."""
        return self.flat.trace(flatten_state(state), *inputs)

    def lower(self, state: PyTree, *inputs: Any) -> jax.stages.Lowered:
        """Trace and lower the step."""
        return self.trace(state, *inputs).lower()
