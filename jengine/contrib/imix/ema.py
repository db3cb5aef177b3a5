"""Parameter averages in the compiled step, which are saved after each epoch."""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.annotations import Decay
from jengine.contrib.imix.hook_base import HookBase
from jengine.errors import ConfigError
from jengine.registry import HOOKS
from jengine.train import StepContext

PyTree = Any


class EMAState(NamedTuple):
    """Averages, as a part of the training state."""

    params: PyTree  # as the parameters; floats are at least float32
    model_state: PyTree  # as the model state; floats are averaged, other leaves are copied


@HOOKS.register_module()
class EMAIterHook(HookBase):
    """Hook that keeps an exponential moving average of parameters and model state, updated in every compiled step.

    The average starts as a copy and is updated by `ema = decay * ema + (1 - decay) * new`. It affects neither training
    nor validation. Checkpoints store it as a hook state, not as parameters; `EMAEpochHook` saves it separately. For an
    average to evaluate and deploy use EMAHook, whose `momentum` is 1 - decay.

    >>> hook = EMAIterHook(decay=0.9)
    >>> state = hook.init_traced_state({"w": jax.numpy.ones(2)}, {})

    Args:
      decay: weight of the average, in [0, 1).
    """

    def __init__(self, decay: Decay = 0.9999) -> None:
        self._decay = decay

    def init_traced_state(self, params: PyTree, model_state: PyTree) -> EMAState:
        """Return a copy of the parameters and the model state."""

        def copy(leaf: jax.Array) -> jax.Array:
            leaf = jnp.asarray(leaf)
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)  # bfloat16 would lose updates below 2**-8 of the value
            return jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32) if is_float else leaf.dtype, copy=True)

        return EMAState(*jax.tree.map(copy, (params, model_state)))

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Update the averages."""

        def update(average: jax.Array, new: jax.Array) -> jax.Array:
            if not jnp.issubdtype(average.dtype, jnp.floating):
                return new
            return average + (1 - self._decay) * (new.astype(average.dtype) - average)  # exact where nothing changes

        new = EMAState(ctx.params, ctx.model_state)
        return ctx.replace(hook_state=jax.tree.map(update, ctx.hook_state, new))

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Update the averages in iterations that only accumulate gradients, too."""
        return self.traced_update(ctx)


@HOOKS.register_module()
class EMAEpochHook(HookBase):
    """Hook that saves the averages of EMAIterHook after each epoch as a checkpoint `ema_epoch_<k>`, k from 0.

    The entries `params` and `model_state` are the averages. A run cannot be resumed from it, but `load_from` can load
    it.
    """

    def before_train(self) -> None:
        """Check that the run computes averages."""
        if not any(isinstance(hook, EMAIterHook) for hook in self.trainer.hooks):
            raise ConfigError("EMAEpochHook must be used with an EMAIterHook, whose averages it saves, got none")

    def after_train_epoch(self) -> None:
        """Save the averages."""
        trainer = self.trainer
        averages = trainer.state.hook_state[EMAIterHook.__name__]
        path = os.path.join(trainer.work_dir, f"ema_epoch_{trainer.epoch}")
        meta = {"epoch": trainer.epoch + 1, "iter": None}  # without a number, no run resumes from it
        trainer.checkpointer.save(path, averages._asdict(), {"meta": meta}, latest=False)
