"""Copies of the newest state on a local disk of each host."""

import os

from jengine.checkpoint.checkpointer import Checkpointer, CheckpointSaveError
from jengine.checkpoint.layout import list_checkpoints
from jengine.config.annotations import Count, Duration
from jengine.config.duration import parse_duration
from jengine.config.registry import HOOKS
from jengine.config.storage import check_local_path
from jengine.data.batch_check import Batch
from jengine.extras.cloud.local_copies import announce_copies, copies_path, describe_layout
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.hooks.save_schedule import TimedSaves


@HOOKS.register_module()
class LocalCheckpointHook(Hook):
    """Copies of the newest state on a local disk of each host, between the checkpoints of
    CheckpointHook.

    A local disk is faster than a bucket, so copies can be frequent. `resume=True` continues from
    them if they are newer than the newest checkpoint, and whole: all processes have one of the same
    iteration. A host that is replaced has none, so the run then continues from the checkpoint. Each
    process writes what its devices hold, without waiting for the others, and keeps two copies. A
    copy that cannot be written is a warning.

    Args:
      directory: a directory on a disk of each host, such as '/local/ssd/jengine'.
      interval: iterations between two copies, or a time: '2m'.

    Examples:
      >>> LocalCheckpointHook("/local/ssd/jengine", interval=50).next_step(runner=None, step=0)
      49
    """

    priority = "VERY_LOW"
    is_single = True

    def __init__(self, directory: str | os.PathLike[str], interval: Count | Duration) -> None:
        self.directory = check_local_path("LocalCheckpointHook.directory", directory)
        self._schedule: TimedSaves | None = None
        if isinstance(interval, str):
            self._schedule = TimedSaves(parse_duration(interval))
            interval = -1
        self.interval = interval
        self._checkpointer: Checkpointer | None = None
        self._is_announced = False
        self._written: list[str] = []  # names of copies, oldest first

    def before_train(self, runner: RunnerProtocol) -> None:
        """Find the copies that are there."""
        path = copies_path(self.directory, runner.work_dir, runner.run.run_id, runner.processes)
        # The logs of the iterations up to a copy must not be lost either, if they are written to a
        # bucket
        files = dict(before_seal=runner.run.send_files) if runner.is_main_process else {}
        self._checkpointer = Checkpointer(path, runner.run.run_id, alone=True, **files)
        self._is_announced = False
        iterations = sorted(
            int(name)
            for copy in list_checkpoints(path)
            if (name := copy.rpartition("_")[2]).isdigit()
        )
        self._written = [
            f"iter_{iteration}" for iteration in iterations if iteration <= runner.iter
        ]
        # What a run did after the checkpoint that it now continues from, another host had no copy
        # of
        self._checkpointer.evict(
            path, [f"iter_{iteration}" for iteration in iterations if iteration > runner.iter]
        )
        if self._schedule is not None:
            self._schedule.start(runner, runner.iter)

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the next step after which to write a copy."""
        if self._schedule is None:
            return self.next_multiple(self.interval, step)
        return self._schedule.next_step(runner, step)

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Write a copy if it is due."""
        if self._schedule is None:
            is_due = self.every_n_train_iters(runner, self.interval)
        else:
            is_due = self._schedule.is_due(runner, runner.iter)
        if is_due:
            self._save(runner, runner.iter + 1)
            # After the save, so that its own time does not count towards the next one.
            if self._schedule is not None:
                self._schedule.start(runner, runner.iter + 1)

    def _save(self, runner: RunnerProtocol, iteration: int) -> None:
        assert self._checkpointer is not None
        # All processes have their last copy once they exchange the position in the data, so the one
        # before can go
        self._wait(runner)
        name = f"iter_{iteration}"
        *older, newest = self._written or [name]
        try:
            runner.save_checkpoint(
                out_dir=str(
                    copies_path(
                        self.directory, runner.work_dir, runner.run.run_id, runner.processes
                    )
                ),
                filename=name,
                meta={
                    "epoch": runner.epoch,
                    "iter": iteration,
                    "layout": describe_layout(runner.state),
                },
                by_epoch=False,
                evict=older,
                checkpointer=self._checkpointer,
            )
            if not self._is_announced and runner.is_main_process:
                announce_copies(runner.work_dir, self.directory)
        except CheckpointSaveError as error:
            runner.logger.warning(f"There is no local copy of iteration {iteration}: {error}")
            return
        self._is_announced = True
        self._written = [newest, name] if self._written else [name]

    def _wait(self, runner: RunnerProtocol) -> None:
        """Wait for the copy in progress, whose failure is only a warning."""
        try:
            if self._checkpointer is not None:
                self._checkpointer.wait()
        except CheckpointSaveError as error:
            runner.logger.warning(f"A local copy could not be written: {error}")

    # The last copy is finished in any case: after a signal CheckpointHook saves what is newer;
    # after an error a restart may continue from the copy.
    after_train = on_interrupt = on_failure = _wait
