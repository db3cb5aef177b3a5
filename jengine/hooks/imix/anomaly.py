"""Finds the operation that makes a NaN."""

import contextlib

import jax

from jengine.hooks.imix.hook_base import HookBase
from jengine.registry import HOOKS


@HOOKS.register_module()
class AutogradAnomalyDetectHook(HookBase):
    """Sets JAX's search for NaNs while training runs, and puts it back as it was at the end.

    Where a step makes a NaN, training ends in that iteration with a FloatingPointError that names the operation. Every
    step is then waited for, and the state of the step that failed is gone: the newest checkpoint is what is left.

    Args:
      mode: whether NaNs are searched for. False switches a search off that was on.
      infs: whether infinities are, too.
    """

    def __init__(self, mode: bool = False, infs: bool = False) -> None:
        self.mode = mode
        self.infs = infs
        self._search = contextlib.ExitStack()

    def before_train(self) -> None:
        """Sets the search for this thread.

        For the process it would not do: once JAX has traced an operation that suspends the search for itself, such as
        logsumexp, a search set for the process no longer reaches the compiled calls of that thread.
        """
        self._search.enter_context(jax.debug_nans(self.mode))
        self._search.enter_context(jax.debug_infs(self.mode and self.infs))

    def after_train(self) -> None:
        """Puts it back; also after an error."""
        self._search.close()
