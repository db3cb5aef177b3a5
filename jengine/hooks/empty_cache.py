"""Free memory that nothing refers to any more."""

import gc
import math
from typing import Any

import jax

from jengine.errors import ConfigError
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class EmptyCacheHook(Hook):
    """Collect garbage before epochs, after epochs or after iterations, in training, validation and test alike.

    This frees device arrays that only reference cycles keep alive. XLA keeps the memory that it has allocated on the
    device; to have it returned set `XLA_PYTHON_CLIENT_ALLOCATOR=platform` in the environment.

    Args:
      before_epoch: before each epoch.
      after_epoch: after each epoch.
      after_iter: after each iteration.
      clear_caches: drop compiled functions too, with their memory; each is then compiled again.

    Raises:
      ConfigError: `clear_caches` after each iteration, which would recompile the step each time.
    """

    def __init__(
        self,
        before_epoch: bool = False,
        after_epoch: bool = True,
        after_iter: bool = False,
        clear_caches: bool = False,
    ) -> None:
        if clear_caches and after_iter:
            raise ConfigError(
                "EmptyCacheHook: clear_caches needs after_iter=False; together they compile the step each time"
            )
        self._at_before_epoch = before_epoch
        self._at_after_epoch = after_epoch
        self._at_after_iter = after_iter
        self._clear_caches = clear_caches

    def next_step(self, runner: Runner, step: int) -> float:
        """Return each step, or none."""
        return step if self._at_after_iter else math.inf

    def _before_epoch(self, runner: Runner, mode: str = "train") -> None:
        if self._at_before_epoch:
            self._empty(runner)

    def _after_epoch(self, runner: Runner, mode: str = "train") -> None:
        if self._at_after_epoch:
            self._empty(runner)

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        if self._at_after_iter:
            self._empty(runner)

    def _empty(self, runner: Runner) -> None:
        gc.collect()
        if self._clear_caches:
            jax.clear_caches()
