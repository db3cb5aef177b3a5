"""Run the same training with the Runner, block by block."""

import functools
import math
import os

from benchmarks.by_hand import EMA_MOMENTUM
from benchmarks.cases import SCHEDULE
from jengine import Runner
from jengine.hooks import Hook


class StopAfterBlock(Hook):
    """Stop training after each block, to measure its time."""

    def __init__(self):
        self.last_iter = 20

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        """Stop the loop."""
        runner.train_loop.stop_training = True

    def next_step(self, runner, step):
        """Return the last iteration of the block."""
        return self.last_iter - 1 if step < self.last_iter else math.inf


class RunnerLoop:
    """Hold a Runner with default hooks and train it block by block.

    Args:
      case: the `Case` to train.
      work_dir: directory of the log and the checkpoints.
      log_every: iterations between log lines, 0 for none.
      ema: whether to average the parameters.
      save_every: iterations between checkpoints, 0 for none.
      steps_per_call: iterations in a chunk.
      hooks: additional hooks.
      optim_wrapper: overrides for the config of the optimizer wrapper.
      dataloader: the data; by default the batches of the case.
    """

    def __init__(
        self,
        case,
        work_dir,
        log_every=0,
        ema=False,
        save_every=0,
        steps_per_call=1,
        hooks=(),
        optim_wrapper=None,
        dataloader=None,
    ):
        discard_terminal_output()
        self._stop = StopAfterBlock()
        ema_hooks = [dict(type="EMAHook", momentum=EMA_MOMENTUM)] if ema else []
        checkpoint = dict(
            type="CheckpointHook",
            by_epoch=False,
            interval=save_every,
            max_keep_ckpts=2,
            save_last=False,
        )
        self.runner = Runner(
            case.model(),
            work_dir,
            train_dataloader=case.batches() if dataloader is None else dataloader,
            train_cfg=dict(by_epoch=False, max_iters=SCHEDULE, steps_per_call=steps_per_call),
            optim_wrapper=dict(optimizer=case.optimizer, **(optim_wrapper or {})),
            param_scheduler=dict(type="CosineAnnealingLR", by_epoch=False, end=SCHEDULE),
            default_hooks=dict(
                logger=dict(type="LoggerHook", interval=log_every) if log_every else None,
                checkpoint=checkpoint if save_every else None,
            ),
            custom_hooks=[*ema_hooks, *hooks, self._stop],
            parallel=dict(type="SingleDevice"),  # as in the hand-written loop
            log_level="INFO" if log_every else "WARNING",
        )
        self.runner.train()

    @property
    def state(self):
        """The train state."""
        return self.runner.state

    def run(self, iters):
        """Train for `iters` more iterations and wait for the last."""
        loop = self.runner.train_loop
        self._stop.last_iter = loop.iter + iters
        loop.stop_training = False
        loop.run()
        self.runner.run.limiter.drain()
        self.runner.log_writer.flush()

    def close(self):
        """Finish background work."""
        self.runner.close()


@functools.cache
def discard_terminal_output():
    """Send the log lines of this process to the null device: they are written, but do not mix
    with the tables.
    """
    from jengine.logging.console import terminal

    terminal.file = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
