"""Provide the hooks of iMIX for debugging: one locates NaNs, one profiles iterations."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax

from jengine.contrib.imix.hook_base import HookBase
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


@HOOKS.register_module()
class AutogradProfilerHook(HookBase):
    """Writes a trace of each iteration for which a predicate is true: of the host and of all devices.

    A trace is a directory `profiler-trace-iter<n>` below `output_dir`, n counted from 0. TensorBoard's profile plugin
    and Perfetto read it. A traced iteration is waited for before the trace ends.

    Args:
      enable_predicate: gets the trainer and says whether the iteration that begins is traced.
      output_dir: the directory of the traces.
      use_cuda: accepted for configs of iMIX; JAX traces whatever devices there are.
    """

    def __init__(
        self, enable_predicate: Callable[[Any], bool], output_dir: str | os.PathLike[str], *, use_cuda: bool = True
    ) -> None:
        self.enable_predicate = enable_predicate
        self.output_dir = output_dir
        self._tracing = False

    def before_train_iter(self) -> None:
        """Begins a trace if the predicate is true."""
        if self.enable_predicate(self.trainer):
            jax.profiler.start_trace(os.path.join(self.output_dir, f"profiler-trace-iter{self.trainer.iter}"))
            self._tracing = True

    def after_train_iter(self) -> None:
        """Ends it when the iteration is done on the device."""
        if self._tracing:
            jax.block_until_ready((self.outputs, self.trainer.state))
            self._stop()

    def after_train(self) -> None:
        """Ends a trace that an error has left open."""
        if self._tracing:
            self._stop()

    def _stop(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()
