"""A real Runner whose step compiles nothing, for tests of what hooks do around it."""

import jax.numpy as jnp
import numpy as np

from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.runner import Runner
from jengine.train import TrainState

MODEL = FunctionalModel(init=lambda: {"w": jnp.ones(2)}, loss=lambda params, batch: params["w"].sum() * batch.mean())
DEFAULT_HOOKS = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")


class StopAfter(Hook):
    """End training after a number of iterations."""

    def __init__(self, iterations):
        self.iterations = iterations

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        runner.train_loop.stop_training = runner.iter + 1 == self.iterations


class Scores:
    """Validation loop that computes nothing: each validation has the next of the given metrics, at last none."""

    def __init__(self, runner, metrics, epoch_length=None):
        self.runner, self.metrics, self.epoch_length = runner, list(metrics), epoch_length

    def run(self):
        if self.metrics:
            self.runner.call_hook("after_val_epoch", metrics=self.metrics.pop(0))


class QuickRunner(Runner):
    """Runner that counts iterations and runs `hooks` alone; the parameters are NaN from `nan_from` iterations on.

    Args:
      epochs, epoch_length, by_epoch: length of the training.
      validations: the metrics of each validation.
      stop_after: iterations after which training ends early.
      done: epochs that are already trained.
    """

    def __init__(
        self,
        work_dir,
        hooks,
        epochs=20,
        epoch_length=4,
        by_epoch=True,
        validations=(),
        stop_after=None,
        done=0,
        **arguments,
    ):
        length = dict(max_epochs=epochs) if by_epoch else dict(by_epoch=False, max_iters=epochs * epoch_length)
        super().__init__(
            MODEL,
            work_dir,
            train_dataloader=[np.zeros(1, np.float32)] * epoch_length,
            train_cfg={**length, "val_interval": 1},
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
            default_hooks=dict.fromkeys(DEFAULT_HOOKS),
            custom_hooks=[*hooks, *([StopAfter(stop_after)] if stop_after else [])],
            **arguments,
        )
        self.nan_from = np.inf
        self.val_loop = Scores(self, validations) if validations else None
        self._done = done, done * epoch_length

    def prepare_training(self, abstract=False):
        iterations = self._done[1]
        self.state = TrainState(
            step=jnp.int32(iterations), params=self.params_after(iterations), model_state={}, opt_state={}, hook_state={},
            rng=jnp.zeros(2, jnp.uint32),
        )  # fmt: skip
        super().prepare_training(abstract)
        loop = self.train_loop
        loop.epoch, loop.iter = self._done
        loop.epoch_start = loop.iter

    def params_after(self, iterations):
        """Return the parameters after a number of iterations: it, twice."""
        return {"w": jnp.full(2, np.nan if iterations >= self.nan_from else float(iterations))}

    def train_step(self, batch):
        iterations = self.iter + 1
        self.state = self.state.replace(step=jnp.int32(iterations), params=self.params_after(iterations))
        return {"loss": np.float32(0)}
