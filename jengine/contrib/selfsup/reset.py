"""Starts a part of a model anew between two iterations: its parameters, and what the optimizer knows of them."""

from collections.abc import Callable
from typing import Any

import jax

from jengine.errors import closest
from jengine.train import TrainState

PyTree = Any


def build_reset(
    model: Any, optim_wrapper: Any, state: TrainState, module: str
) -> Callable[[TrainState, jax.Array, PyTree], TrainState]:
    """Builds `reset(state, rng, batch) -> state`, which initialises the parameters of one module anew.

    Their part of the optimizer's state starts anew too: momentum of weights that are gone would move the new ones.
    Everything else keeps its bits, and every array its place among the devices. The old state is donated.

    Args:
      model: whose `init` makes the new parameters.
      optim_wrapper: the optimizer wrapper, a single one.
      state: a state of the form to come.
      module: a component of the paths of the parameters, such as 'head'.

    Raises:
      AssertionError: no parameter's path has that component.
    """
    layout = optim_wrapper.grouped.layout(state.params)
    chosen = [True if module in path.split(".") else None for path in layout.paths]
    if not any(chosen):
        parts = {part for path in layout.paths for part in path.split(".")[:-1]} or layout.paths
        raise AssertionError(f"no parameter lies in a module called {module!r}{closest(module, parts)}")

    def reset(params: PyTree, opt_state: Any, rng: jax.Array, batch: PyTree) -> tuple[PyTree, Any]:
        fresh = layout.flatten(model.init(rng, batch)[0])
        old = layout.flatten(params)
        rows = zip(chosen, fresh, old, strict=True)
        params = layout.treedef.unflatten([a.astype(b.dtype) if new else b for new, a, b in rows])
        return params, optim_wrapper.grouped.hold(layout, chosen, optim_wrapper.tx.init(params), opt_state)

    places = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
    compiled = jax.jit(reset, donate_argnums=(0, 1), out_shardings=places)

    def whole(state: TrainState, rng: jax.Array, batch: PyTree) -> TrainState:
        params, opt_state = compiled(state.params, state.opt_state, rng, batch)
        return state.replace(params=params, opt_state=opt_state)

    return whole
