"""Run the same training through the Runner, block by block."""

import functools
import math
import os

from benchmarks.by_hand import EMA_MOMENTUM
from benchmarks.cases import SCHEDULE
from jengine import Runner
from jengine.hooks import Hook


class EndOfBlock(Hook):
    """End a long training after each block, to read the clock."""

    def __init__(self):
        self.at = 20

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        """End the training."""
        runner.train_loop.stop_training = True

    def next_step(self, runner, step):
        """Return the last iteration of the block."""
        return self.at - 1 if step < self.at else math.inf


class ByRunner:
    """Hold a Runner with its default hooks, whose training continues from block to block.

    Args:
      case: the trained case.
      work_dir: directory of the log and the checkpoints.
      log_every: iterations between two lines of the log, 0 for none.
      ema: keep an average of the parameters.
      save_every: iterations between two checkpoints, 0 for none.
      steps_per_call: iterations in a chunk.
      hooks: further hooks.
      optim_wrapper: changes to the optimizer's wrapper.
      dataloader: the data; by default the batches of the case.
    """

    def __init__(
        self, case, work_dir, log_every=0, ema=False, save_every=0, steps_per_call=1, hooks=(), optim_wrapper=None,
        dataloader=None,
    ):  # fmt: skip
        _terminal()
        self._end = EndOfBlock()
        custom = [dict(type="EMAHook", momentum=EMA_MOMENTUM)] if ema else []
        saving = dict(type="CheckpointHook", by_epoch=False, interval=save_every, max_keep_ckpts=2, save_last=False)
        self.runner = Runner(
            case.model(),
            work_dir,
            train_dataloader=case.batches() if dataloader is None else dataloader,
            train_cfg=dict(by_epoch=False, max_iters=SCHEDULE, steps_per_call=steps_per_call),
            optim_wrapper=dict(optimizer=case.optimizer, **(optim_wrapper or {})),
            param_scheduler=dict(type="CosineAnnealingLR", by_epoch=False, end=SCHEDULE),
            default_hooks=dict(
                logger=dict(type="LoggerHook", interval=log_every) if log_every else None,
                checkpoint=saving if save_every else None,
            ),
            custom_hooks=[*custom, *hooks, self._end],
            parallel=dict(type="SingleDevice"),  # as the loop by hand
            log_level="INFO" if log_every else "WARNING",
        )
        self.runner.train()

    @property
    def state(self):
        """The training state."""
        return self.runner.state

    def run(self, iters):
        """Train for `iters` further iterations, to the end of the last."""
        loop = self.runner.train_loop
        self._end.at, loop.stop_training = loop.iter + iters, False
        loop.run()
        self.runner.dispatch_limiter.drain()
        self.runner.log_writer.flush()

    def close(self):
        """End background work."""
        self.runner._close()


@functools.cache
def _terminal():
    """Discard the terminal output: it is written line by line, and does not disturb the tables."""
    from jengine.logging.console import terminal

    terminal.file = open(os.devnull, "w")  # noqa: SIM115 - open to the end of the process
