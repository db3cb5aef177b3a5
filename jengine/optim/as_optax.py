"""An optimizer wrapper as a plain optax chain, for loops that are not this engine's."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from jengine.optim.clip import clipping
from jengine.optim.core import Tree

if TYPE_CHECKING:
    from jengine.optim.wrapper import OptimWrapper


def as_optax(wrapper: "OptimWrapper") -> optax.GradientTransformationExtraArgs:
    """Clipping, decay and the optimizer's step as optax transformations, under `optax.MultiSteps` when accumulating.

    The numbers are those of the groups at the time of the trace; `tx.update(..., hyperparams=wrapper.hyperparams)`
    hands over others as data. A window that the end of training cuts short is dropped, as MultiSteps does.

    Args:
      wrapper: the wrapper, without loss scaling.
    """
    clip = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), _clip_update(wrapper))
    step = optax.GradientTransformationExtraArgs(wrapper.grouped.init, _step_update(wrapper))
    chain = optax.chain(clip, step)
    if wrapper.accumulative_counts == 1:
        return chain
    steps = optax.MultiSteps(chain, every_k_schedule=wrapper.accumulative_counts)
    return optax.GradientTransformationExtraArgs(*steps.gradient_transformation())


def _clip_update(wrapper: "OptimWrapper") -> Any:
    def update(grads: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        layout = wrapper.grouped.layout(grads if params is None else params)
        trainable = layout.trainable(grads)
        clip, _ = clipping(trainable, wrapper.clip_grad)
        return layout.fill(clip(trainable), jax.tree.map(jnp.zeros_like, grads)), state

    return update


def _step_update(wrapper: "OptimWrapper") -> Any:
    def update(
        grads: Tree, state: Any, params: Tree = None, *, hyperparams: Any = None, **extra: Any
    ) -> tuple[Tree, Any]:
        """The updates of all parameters, zeros for those that are frozen."""
        layout = wrapper.grouped.layout(grads if params is None else params)
        numbers = wrapper.hyperparams if hyperparams is None else hyperparams
        params = grads if params is None else params
        updates, state = wrapper.grouped.update(layout.trainable(grads), state, params, numbers)
        return layout.fill(updates, jax.tree.map(jnp.zeros_like, params)), state

    return update
