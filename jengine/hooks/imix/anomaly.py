"""Finds the operation that makes a NaN."""

from typing import Any

import jax

from jengine.hooks.imix.hook_base import HookBase
from jengine.registry import HOOKS

_NANS, _INFS = "jax_debug_nans", "jax_debug_infs"


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
        self._before: dict[str, Any] = {}

    def before_train(self) -> None:
        """Sets the search."""
        self._before = {flag: getattr(jax.config, flag) for flag in (_NANS, _INFS)}
        jax.config.update(_NANS, self.mode)
        jax.config.update(_INFS, self.mode and self.infs)

    def after_train(self) -> None:
        """Puts it back; also after an error."""
        for flag, value in self._before.items():
            jax.config.update(flag, value)
        self._before = {}
