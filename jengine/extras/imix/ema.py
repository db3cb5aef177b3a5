"""Parameter averages in the compiled step, which are saved after each epoch."""

import dataclasses
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.config.annotations import Decay
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.extras.imix.hook_base import HookBase
from jengine.train.average import Average, AverageState
from jengine.train.traced_hooks import StepContext


class EMAState(NamedTuple):
    """Averages, as a part of the training state."""

    params: Any  # as the parameters; floats are at least float32
    model_state: Any  # as the model state; floats are averaged, other leaves are copied


@dataclasses.dataclass(frozen=True)
class _Average(Average):
    """Exponential average that, unlike `ExponentialMovingAverage`, may have the decay 0."""

    decay: float
    interval: int = 1

    def weight(self, steps: jax.Array) -> jax.Array:
        """Return the weight of the new value."""
        return jnp.asarray(1 - self.decay, float)


@HOOKS.register_module()
class EMAIterHook(HookBase):
    """Hook that keeps an exponential moving average of parameters and model state, updated in every
    compiled step.

    The average starts as a copy and is updated by `ema = decay * ema + (1 - decay) * new`. It
    affects neither training nor validation. Checkpoints store it as a hook state, not as
    parameters; `EMAEpochHook` saves it separately. For an average to evaluate and deploy use
    EMAHook, whose `momentum` is 1 - decay.

    >>> hook = EMAIterHook(decay=0.9)
    >>> state = hook.init_traced_state({"w": jax.numpy.ones(2)}, {})

    Args:
      decay: weight of the average, in [0, 1).
    """

    def __init__(self, decay: Decay = 0.9999) -> None:
        self._average = _Average(decay)

    def init_traced_state(self, params: Any, model_state: Any) -> EMAState:
        """Return a copy of the parameters and the model state."""
        return EMAState(*self._average.init((params, model_state)).params)

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Update the averages."""
        # the engine's first update, number 0, copies the parameters; iMIX's average starts as that
        # copy
        average = AverageState(tuple(ctx.hook_state), steps=jnp.ones((), jnp.int32))
        new = self._average.update(average, (ctx.params, ctx.model_state))
        return ctx.replace(hook_state=EMAState(*new.params))

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Update the averages in iterations that only accumulate gradients, too."""
        return self.traced_update(ctx)


@HOOKS.register_module()
class EMAEpochHook(HookBase):
    """Hook that saves the averages of EMAIterHook after each epoch as a checkpoint `ema_epoch_<k>`,
    k from 0.

    The entries `params` and `model_state` are the averages. A run cannot be resumed from it, but
    `load_from` can load it.
    """

    def before_train(self) -> None:
        """Check that the run computes averages."""
        if not any(isinstance(hook, EMAIterHook) for hook in self.trainer.hooks):
            raise ConfigError(
                "EMAEpochHook must be used with an EMAIterHook, whose averages it saves, got none"
            )

    def after_train_epoch(self) -> None:
        """Save the averages."""
        trainer = self.trainer
        averages = trainer.state.hook_state[EMAIterHook.__name__]
        path = os.path.join(trainer.work_dir, f"ema_epoch_{trainer.epoch}")
        # without a number, no run resumes from it
        meta = {"epoch": trainer.epoch + 1, "iter": None}
        trainer.checkpointer.save(path, averages._asdict(), {"meta": meta}, latest=False)
