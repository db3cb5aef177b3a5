"""The queue of SwAV, and layers of it that are frozen at first."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine import paths
from jengine.contrib.selfsup.entries import put_beside
from jengine.contrib.selfsup.losses import SwAVQueue, empty_queue
from jengine.errors import closest
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS
from jengine.train import StepContext

PyTree = Any


@HOOKS.register_module()
class SwAVHook(Hook):
    """Lends the model a queue of earlier embeddings, and freezes layers for the first iterations.

    The queue is a part of the training state, there from the start: what changes at epoch `epoch_queue_starts` is a
    flag in it. In the model's loss it is `model_state['queue']`, a `SwAVQueue`; the loss returns its successor under
    the same name (see `swav_loss`). Validation does not see it. It lies in every checkpoint, and besides, after every
    `interval` epochs, in `queue.npy` in the work dir, from which a run that does not resume starts.

    Frozen layers keep their bits: parameters and optimizer state.

    Args:
      batch_size: rows of a batch on each process.
      epoch_queue_starts: the epoch, counted from 0, in which the queue begins to fill.
      crops_for_assign: the views that get assignments; the queue has rows for each.
      feat_dim: size of an embedding.
      queue_length: rows over all processes, rounded down to whole batches; 0: no queue.
      interval: epochs between two writes of the file.
      frozen_layers_cfg: iterations for which parameters are frozen, by what their paths contain; each entry for
        itself.

    Raises:
      AssertionError: at the beginning of the run, if an entry of `frozen_layers_cfg` matches no parameter.
      ValueError: a queue shorter than a batch, or a stored queue of another form.
    """

    runs_ahead = True

    def __init__(
        self,
        batch_size: int,
        epoch_queue_starts: int = 15,
        crops_for_assign: Sequence[int] = (0, 1),
        feat_dim: int = 128,
        queue_length: int = 0,
        interval: int = 1,
        frozen_layers_cfg: Mapping[str, int] | None = None,
    ) -> None:
        if 0 < queue_length < batch_size:
            raise ValueError(f"SwAVHook: queue_length={queue_length} is shorter than a batch of {batch_size}")
        self.batch_size = batch_size
        self.epoch_queue_starts = epoch_queue_starts
        self.crops_for_assign = tuple(crops_for_assign)
        self.feat_dim = feat_dim
        self.queue_length = queue_length
        self.interval = interval
        self.frozen_layers_cfg = dict(frozen_layers_cfg or {})

    # --- In the step. ---

    def init_traced_state(self, params: PyTree, model_state: PyTree) -> SwAVQueue | None:
        """An empty queue, or None for none."""
        length = whole_batches(self.queue_length, self.batch_size * jax.process_count())
        return empty_queue(len(self.crops_for_assign), length, self.feat_dim) if length else None

    def traced_batch(self, ctx: StepContext) -> StepContext:
        """Lends the queue to the model."""
        if ctx.hook_state is None:
            return ctx
        return ctx.replace(model_state={**ctx.model_state, "queue": ctx.hook_state})

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Takes the queue back as the model left it.

        Raises:
          AssertionError: the model's state has no queue any more.
        """
        if ctx.hook_state is None:
            return ctx
        if "queue" not in ctx.model_state:
            raise AssertionError(
                "SwAVHook lends the model `model_state['queue']`; the model's loss must return it in its new model "
                f"state, which has {sorted(ctx.model_state)}"
            )
        rest = {name: value for name, value in ctx.model_state.items() if name != "queue"}
        return ctx.replace(model_state=rest, hook_state=SwAVQueue(*ctx.model_state["queue"]))

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Likewise where gradients were only accumulated."""
        return self.traced_update(ctx)

    # --- Around it. ---

    def before_run(self, runner: Runner) -> None:
        """Holds that there is what is to be frozen, and reads the queue that an earlier run left."""
        if runner.state is None or runner.optim_wrapper is None:
            return
        there = list(paths.flatten(runner.state.params))
        for pattern in self.frozen_layers_cfg:
            if not any(pattern in spelling for path in there for spelling in paths.spellings(path)):
                raise AssertionError(
                    f"SwAVHook: frozen_layers_cfg has {pattern!r}, which is in the path of no parameter"
                    f"{closest(pattern, there)}"
                )
        queue, path = self._queue(runner), self._path(runner)
        if queue is not None and runner.iter == 0 and os.path.exists(path):
            rows = np.load(path)
            if rows.shape != queue.rows.shape:
                raise ValueError(
                    f"{path} holds a queue of the shape {rows.shape}, this run has {queue.rows.shape}: remove the file "
                    "or set the hook as it was"
                )
            runner.logger.info(f"SwAVHook: starts with the queue of {path}.")
            self._set(runner, queue._replace(rows=rows, active=jnp.ones((), jnp.bool_)))

    def before_train(self, runner: Runner) -> None:
        """Names the flags that freeze before the step is traced."""
        self._freeze(runner)

    def before_train_epoch(self, runner: Runner) -> None:
        """Begins the queue when it is time; whether it is full is found out anew."""
        queue = self._queue(runner)
        if queue is not None:
            # An operation on the device: whether a resumed queue is active need not be known here.
            active = jnp.logical_or(queue.active, runner.epoch >= self.epoch_queue_starts)
            self._set(runner, queue._replace(active=active, use_queue=jnp.zeros((), jnp.bool_)))

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Sets the flags of this iteration."""
        self._freeze(runner)

    def after_train_epoch(self, runner: Runner) -> None:
        """Writes the queue to its file."""
        queue = self._queue(runner)
        if queue is None or not runner.is_main_process or not self.every_n_epochs(runner, self.interval):
            return
        if queue.active:
            path = self._path(runner)
            np.save(f"{path}.tmp.npy", np.asarray(queue.rows))
            os.replace(f"{path}.tmp.npy", path)

    def _freeze(self, runner: Runner) -> None:
        for pattern, iters in self.frozen_layers_cfg.items():
            runner.hyperparams[f"frozen:{pattern}"] = runner.iter < iters

    def _queue(self, runner: Runner) -> SwAVQueue | None:
        assert runner.state is not None
        return runner.state.hook_state.get(type(self).__name__)

    def _set(self, runner: Runner, queue: SwAVQueue) -> None:
        assert runner.state is not None
        name = type(self).__name__
        placed = put_beside(queue, self._queue(runner))
        runner.state = runner.state.replace(hook_state={**runner.state.hook_state, name: placed})

    @staticmethod
    def _path(runner: Runner) -> str:
        return os.path.join(runner.work_dir, "queue.npy")


def whole_batches(length: int, batch: int) -> int:
    """The largest multiple of `batch` that is at most `length`.

    Args:
      length: rows wanted.
      batch: rows of a batch over all processes.
    """
    return length - length % batch
