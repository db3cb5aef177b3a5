"""Averages the parameters in the step, and saves the averages after each epoch."""

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
    """The averages; part of the training state."""

    params: PyTree  # like the parameters; floats at least float32
    model_state: PyTree  # like the model's state; its floating part is averaged, the rest is the newest


@HOOKS.register_module()
class EMAIterHook(HookBase):
    """Keeps an exponential average of parameters and model state, moved in every iteration, inside the compiled step.

    The average starts as a copy and moves by `ema = decay * ema + (1 - decay) * new`. It takes no part in training,
    validation or the parameters of a checkpoint, which holds it as the state of this hook; `EMAEpochHook` saves it by
    itself. For an average that is evaluated and deployed use EMAHook, whose `momentum` is 1 - decay.

    Args:
      decay: the weight of the average, in [0, 1).

    Raises:
      ValueError: a decay outside that range.
    """

    def __init__(self, decay: Decay = 0.9999) -> None:
        self._decay = decay

    def init_traced_state(self, params: PyTree, model_state: PyTree) -> EMAState:
        """A copy."""
        return EMAState(jax.tree.map(_wide_copy, params), jax.tree.map(_wide_copy, model_state))

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Moves the averages."""
        new = EMAState(ctx.params, ctx.model_state)
        return ctx.replace(hook_state=jax.tree.map(self._move, ctx.hook_state, new))

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Moves them in iterations that only accumulate gradients, too."""
        return self.traced_update(ctx)

    def _move(self, average: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(average.dtype, jnp.floating):
            return new
        return average + (1 - self._decay) * (new.astype(average.dtype) - average)


@HOOKS.register_module()
class EMAEpochHook(HookBase):
    """Saves the averages of EMAIterHook after each epoch as a checkpoint `ema_epoch_<k>`, k counted from 0.

    Its `params` and `model_state` are the averages; the training's own parameters are what they were. No run is resumed
    from it, but `load_from` reads it.
    """

    def before_train(self) -> None:
        """Checks that there are averages.

        Raises:
          ConfigError: there are none.
        """
        if not any(isinstance(hook, EMAIterHook) for hook in self.trainer.hooks):
            raise ConfigError("EMAEpochHook saves the averages of EMAIterHook, which the run does not have")

    def after_train_epoch(self) -> None:
        """Saves the averages."""
        trainer = self.trainer
        averages = trainer.state.hook_state[EMAIterHook.__name__]
        path = os.path.join(trainer.work_dir, f"ema_epoch_{trainer.epoch}")
        meta = {"epoch": trainer.epoch + 1, "iter": None}  # without a number it is no place to resume from
        trainer.checkpointer.save(path, averages._asdict(), {"meta": meta}, latest=False)


def _wide_copy(leaf: jax.Array) -> jax.Array:
    leaf = jnp.asarray(leaf)
    wide = jnp.promote_types(leaf.dtype, jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
    return jnp.array(leaf, wide, copy=True)
