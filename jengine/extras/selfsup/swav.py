"""SwAV's queue of embeddings in the training state, and layers that are frozen in the first
iterations.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config import paths
from jengine.config.annotations import Count, Index
from jengine.config.errors import ArgumentError, closest
from jengine.config.registry import HOOKS
from jengine.extras.selfsup.losses import SwAVQueue, empty_queue
from jengine.extras.selfsup.model_entries import device_put_like, save_array
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.model import ModelState
from jengine.train.traced_hooks import StepContext


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class SwAVHook(Hook):
    """Hook that gives the model a queue of earlier embeddings, and freezes layers in the first
    iterations.

    The queue is part of the training state from the start; at epoch `epoch_queue_starts` only a
    flag in it changes. The model's loss reads it as `model_state['queue']`, a `SwAVQueue`, and
    returns the updated queue under the same name (see `swav_loss`). Validation runs without it. It
    is saved in each checkpoint and also, every `interval` epochs, in `queue.npy` in the work dir,
    which a run that is not resumed starts from.

    Parameters and optimizer state in frozen layers do not change at all.

    >>> hook = SwAVHook(
    ...     batch_size=32, queue_length=320, feat_dim=16, frozen_layers_cfg={"prototypes": 100}
    ... )
    >>> hook.init_traced_state({}, {}).rows.shape
    (2, 320, 16)

    Args:
      batch_size: batch size per process.
      epoch_queue_starts: epoch, counted from 0, in which the queue starts to fill.
      crops_for_assign: the views to compute assignments for, each with a queue.
      feat_dim: embedding size.
      queue_length: number of embeddings over all processes, rounded down to whole batches; 0 for no
        queue.
      interval: number of epochs between writes of the file.
      frozen_layers_cfg: substring of parameter paths -> number of iterations for which they are
        frozen.

    Raises:
      ArgumentError: at the beginning of the run, if an entry in `frozen_layers_cfg` matches no
        parameter.
      ValueError: a queue shorter than a batch, or a stored queue of another shape.
    """

    acts_on = "hyperparams"

    batch_size: Count
    epoch_queue_starts: Index = 15
    crops_for_assign: Sequence[Index] = (0, 1)
    feat_dim: Count = 128
    queue_length: Index = 0
    interval: Count = 1
    frozen_layers_cfg: Mapping[str, Index] | None = None

    def __post_init__(self) -> None:
        if 0 < self.queue_length < self.batch_size:
            raise ValueError(
                f"SwAVHook: `queue_length` must be 0 or at least a batch, {self.batch_size}, got "
                f"{self.queue_length}"
            )
        # a flag per pattern, `frozen:<pattern>`, read by the step
        self._frozen = dict(self.frozen_layers_cfg or {})

    # --- Inside the compiled step. ---

    def init_traced_state(self, params: Any, model_state: ModelState) -> SwAVQueue | None:
        """Return an empty queue, or None without a queue."""
        length = self.queue_length - self.queue_length % (self.batch_size * jax.process_count())
        return empty_queue(len(self.crops_for_assign), length, self.feat_dim) if length else None

    def traced_batch(self, ctx: StepContext) -> StepContext:
        """Add the queue to the model state."""
        if ctx.hook_state is None:
            return ctx
        return ctx.replace(model_state={**ctx.model_state, "queue": ctx.hook_state})

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Take the updated queue out of the model state."""
        if ctx.hook_state is None:
            return ctx
        if "queue" not in ctx.model_state:
            raise ArgumentError(
                "SwAVHook: the new model state of the model's loss must have the entry 'queue', "
                f"the updated `model_state['queue']`, got {sorted(ctx.model_state)}"
            )
        # The queue travels in the model state during the loss only: it belongs to the hook, in
        # whose state it is saved.
        model_state = {name: value for name, value in ctx.model_state.items() if name != "queue"}
        return ctx.replace(model_state=model_state, hook_state=SwAVQueue(*ctx.model_state["queue"]))

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Take the updated queue out of the model state in iterations that only accumulate
        gradients too.
        """
        return self.traced_update(ctx)

    # --- On the host. ---

    def before_run(self, runner: RunnerProtocol) -> None:
        """Check that the frozen layers exist, and read the queue that an earlier run wrote."""
        if runner.state is None or runner.optim_wrapper is None:
            return
        param_paths = list(paths.flatten(runner.state.params))
        for pattern in self._frozen:
            if not any(
                pattern in alias for path in param_paths for alias in paths.path_aliases(path)
            ):
                raise ArgumentError(
                    "SwAVHook: `frozen_layers_cfg` must have substrings of parameter paths, got "
                    f"{pattern!r}{closest(pattern, param_paths)}"
                )
        queue = self._queue(runner)
        path = self._path(runner)
        # Only at the very start: a resumed run has its queue in the checkpoint.
        if queue is not None and runner.iter == 0 and os.path.exists(path):
            rows = np.load(path)
            if rows.shape != queue.rows.shape:
                raise ValueError(
                    f"SwAVHook: the queue in {path} must have the shape {queue.rows.shape}, got "
                    f"{rows.shape}; remove the file or restore the arguments of the hook"
                )
            runner.logger.info(f"SwAVHook: starting with the queue in {path}.")
            self._set_queue(runner, queue._replace(rows=rows, active=jnp.ones((), jnp.bool_)))

    def before_train(self, runner: RunnerProtocol) -> None:
        """Set the first flags, so that the step is traced with them."""
        self.before_train_iter(runner, 0)

    def before_train_epoch(self, runner: RunnerProtocol) -> None:
        """Activate the queue from its epoch on; the step determines again whether it is full."""
        queue = self._queue(runner)
        if queue is not None:
            # Computed on the device: the host need not wait to learn whether a resumed queue is
            # active.
            active = jnp.logical_or(queue.active, runner.epoch >= self.epoch_queue_starts)
            self._set_queue(
                runner, queue._replace(active=active, use_queue=jnp.zeros((), jnp.bool_))
            )

    def before_train_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Set the flags that freeze layers in this iteration."""
        for pattern, iters in self._frozen.items():
            runner.hyperparams[f"frozen:{pattern}"] = runner.iter < iters

    def after_train_epoch(self, runner: RunnerProtocol) -> None:
        """Write the queue to its file."""
        queue = self._queue(runner)
        if (
            queue is None
            or not runner.is_main_process
            or not self.every_n_epochs(runner, self.interval)
        ):
            return
        if queue.active:
            save_array(self._path(runner), np.asarray(queue.rows))

    def _queue(self, runner: RunnerProtocol) -> SwAVQueue | None:
        return runner.state.hook_state.get(type(self).__name__)

    def _set_queue(self, runner: RunnerProtocol, queue: SwAVQueue) -> None:
        name = type(self).__name__
        hook_state = runner.state.hook_state
        queue = device_put_like(queue, hook_state[name])
        runner.state = runner.state.replace(hook_state={**hook_state, name: queue})

    @staticmethod
    def _path(runner: RunnerProtocol) -> str:
        return os.path.join(runner.local_dir, "queue.npy")
