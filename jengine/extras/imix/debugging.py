"""iMIX's debugging hooks: one locates NaNs, one profiles iterations."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax

from jengine.config.registry import HOOKS
from jengine.extras.imix.hook_base import HookBase


@HOOKS.register_module()
class AutogradAnomalyDetectHook(HookBase):
    """Hook that sets JAX's NaN checks during training, and restores the previous setting at the
    end.

    A step that produces a NaN ends training with a FloatingPointError that names the operation.
    With the checks the host waits for every step, and the state after the failed step is lost: only
    the latest checkpoint remains.

    >>> AutogradAnomalyDetectHook(mode=True, infs=True).mode
    True

    Args:
      mode: whether to check for NaNs. False disables checks that were enabled before.
      infs: whether to check for infinities, too.
    """

    def __init__(self, mode: bool = False, infs: bool = False) -> None:
        self.mode = mode
        self.infs = infs
        self._checks = contextlib.ExitStack()

    def before_train(self) -> None:
        """Set the checks for this thread."""
        # Not for the process: once JAX has traced an operation that disables the checks internally,
        # such as logsumexp, the process-wide setting no longer affects the compiled calls of that
        # thread.
        self._checks.enter_context(jax.debug_nans(self.mode))
        self._checks.enter_context(jax.debug_infs(self.mode and self.infs))

    def after_train(self) -> None:
        """Restore the previous setting, also after an error."""
        self._checks.close()


@HOOKS.register_module()
class AutogradProfilerHook(HookBase):
    """Hook that traces the host and all devices in each iteration that a predicate selects.

    A trace is a directory `profiler-trace-iter<n>` in `output_dir`, with n counted from 0, for
    TensorBoard's profile plugin and Perfetto. The host waits for a traced iteration before it ends
    the trace.

    >>> hook = AutogradProfilerHook(lambda trainer: trainer.iter == 10, "traces")

    Args:
      enable_predicate: function that takes the trainer and returns whether to trace the iteration
        that starts.
      output_dir: directory for the traces.
      use_cuda: without effect, for compatibility with iMIX; JAX traces all devices.
    """

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool],
        output_dir: str | os.PathLike[str],
        *,
        use_cuda: bool = True,
    ) -> None:
        self.enable_predicate = enable_predicate
        self.output_dir = output_dir
        self._tracing = False

    def before_train_iter(self) -> None:
        """Start a trace if the predicate is true."""
        if self.enable_predicate(self.trainer):
            jax.profiler.start_trace(
                os.path.join(self.output_dir, f"profiler-trace-iter{self.trainer.iter}")
            )
            self._tracing = True

    def after_train_iter(self) -> None:
        """Stop the trace after the device has completed the iteration."""
        if self._tracing:
            jax.block_until_ready((self.outputs, self.trainer.state))
            self.after_train()

    def after_train(self) -> None:
        """Stop the trace, also that of an iteration that failed."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
