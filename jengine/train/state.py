"""The training state: one donated pytree that holds whatever changes in a run and is used inside the step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct

from jengine.train.traced_hooks import TracedHooks

if TYPE_CHECKING:
    from jengine.optim import OptimWrapper

PyTree = Any


class TrainState(struct.PyTreeNode):
    """Everything that a training step reads and writes.

    Attributes:
      step: int32[], training iterations done (micro-batches under gradient accumulation).
      params: the model's parameters.
      model_state: what the model carries besides (running statistics), {} for none.
      opt_state: the optimizer wrapper's state, moments in float32.
      hook_state: traced hooks' states by hook name.
      rng: key<fry>[], the run's key; constant: each step folds its own number in.
    """

    step: jax.Array
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    hook_state: dict[str, PyTree]
    rng: jax.Array


def create_train_state(
    params: PyTree, model_state: PyTree, optim_wrapper: "OptimWrapper", hooks: Sequence[Any] = (), *, rng: jax.Array
) -> TrainState:
    """The state before the first iteration, strongly typed: a step is compiled again for arrays that were not.

    Args:
      params: parameters; taken into the state as they are, so they must not be used elsewhere once a step was run.
      model_state: the model's other state.
      optim_wrapper: makes the optimizer's state.
      hooks: those with traced state add theirs.
      rng: key<fry>[], the run's key.
    """
    params, model_state = strongly_typed(params), strongly_typed(model_state)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state=model_state,
        opt_state=optim_wrapper.init(params),
        hook_state=TracedHooks(hooks).init(params, model_state),
        rng=rng,
    )


def strongly_typed(tree: PyTree) -> PyTree:
    """The arrays with dtypes that hold against others, where a Python number had lent its own (`jnp.full(3, 0.5)`).

    Args:
      tree: arrays; keys and strongly typed arrays are passed through.
    """
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x, tree)
