"""An optimizer wrapper as a plain optax chain, for training loops outside this engine."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine.optim.clip import ClipByNorm, ClipByValue, clipping
from jengine.optim.core import Tree
from jengine.optim.grouped import GroupedOptimizer


def as_optax(
    grouped: GroupedOptimizer,
    clip_grad: ClipByNorm | ClipByValue | None,
    accumulative_counts: int,
    hyperparams: Callable[[], Mapping[str, Any]],
) -> optax.GradientTransformationExtraArgs:
    """Chain clipping, decay and the optimizer's step, under `optax.MultiSteps` when accumulating.

    The hyperparameters are those at the time of the trace; `tx.update(..., hyperparams=wrapper.hyperparams)` passes
    others as data. A window that the end of training cuts short is dropped, as MultiSteps does.

    Args:
      grouped: the optimizer with its parameter groups.
      clip_grad: the clipping of gradients.
      accumulative_counts: iterations whose mean gradient makes one update.
      hyperparams: returns the hyperparameters by name, as a compiled step takes them.
    """
    clip = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), _clip_update(grouped, clip_grad))
    step = optax.GradientTransformationExtraArgs(grouped.init, _step_update(grouped, hyperparams))
    chain = optax.chain(clip, step)
    if accumulative_counts == 1:
        return chain
    steps = optax.MultiSteps(chain, every_k_schedule=accumulative_counts)
    return optax.GradientTransformationExtraArgs(*steps.gradient_transformation())


def _clip_update(grouped: GroupedOptimizer, clip_grad: ClipByNorm | ClipByValue | None) -> Any:
    def update(grads: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        layout = grouped.layout(grads if params is None else params)
        trainable = layout.trainable(grads)
        clip, _ = clipping(trainable, clip_grad)
        return layout.fill(clip(trainable), jax.tree.map(jnp.zeros_like, grads)), state

    return update


def _step_update(grouped: GroupedOptimizer, current: Callable[[], Mapping[str, Any]]) -> Any:
    def update(
        grads: Tree, state: Any, params: Tree = None, *, hyperparams: Any = None, **extra: Any
    ) -> tuple[Tree, Any]:
        """Return the updates of all parameters, zeros for the frozen ones."""
        layout = grouped.layout(grads if params is None else params)
        numbers = current() if hyperparams is None else hyperparams
        params = grads if params is None else params
        updates, state = grouped.update(layout.trainable(grads), state, params, numbers)
        return layout.fill(updates, jax.tree.map(jnp.zeros_like, params)), state

    return update
