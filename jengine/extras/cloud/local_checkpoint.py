"""Copies of the newest state on local disks: that of each host, and that of a neighbour."""

import math
import os
import secrets
import socket
from pathlib import Path

from jengine.checkpoint.checkpointer import Checkpointer, CheckpointSaveError
from jengine.checkpoint.progress import wait_for_processes
from jengine.config.annotations import Count, Duration, Index
from jengine.config.duration import parse_duration
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.config.storage import check_local_path
from jengine.data.batch_check import Batch
from jengine.extras.cloud.kept_copies import KeptCopies
from jengine.extras.cloud.local_copies import (
    announce_copies,
    copies_path,
    describe_layout,
    find_disk,
    list_names,
)
from jengine.extras.cloud.neighbours import Packed, pack
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.hooks.save_schedule import TimedSaves


@HOOKS.register_module()
class LocalCheckpointHook(Hook):
    """Copies of the newest state on a local disk of each host, and of its neighbour, between the
    checkpoints of CheckpointHook.

    A local disk is faster than a bucket, so copies can be frequent. `resume=True` continues from
    them if they are newer than the newest checkpoint, and whole: the disks together have one of
    each process, all of the same iteration. Each process writes what its devices hold, in the
    background and without waiting for the others. When all have written it, the copy is sent to a
    process on the next host, so a host that is replaced gets it back from there. Each disk has two
    copies of each process that it keeps. A copy that cannot be written is a warning.

    Args:
      directory: a directory on a disk of each host, such as '/local/ssd/jengine' or
        '$LOCAL_DISK/jengine', with environment variables that may differ between the hosts.
      interval: iterations between two copies, or a time: '2m'.
      neighbours: other hosts that keep each copy too; 0 for none. With as many lost hosts a restart
        needs no checkpoint. Each costs the time to send a copy, in which training waits, the
        memory of a host for one more, and twice its size on disk.

    Examples:
      >>> LocalCheckpointHook("/local/ssd/jengine", interval=50).next_step(runner=None, step=0)
      49
    """

    priority = "VERY_LOW"
    is_single = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        interval: Count | Duration,
        neighbours: Index = 1,
    ) -> None:
        text = os.fspath(directory)
        expanded = os.path.expandvars(text)
        if "$" in expanded:
            raise ConfigError(
                "`LocalCheckpointHook.directory` must have environment variables that are set, "
                f"got {text!r}"
            )
        self.directory = check_local_path("LocalCheckpointHook.directory", expanded)
        # as a restart reads it, on each host
        self._announced = self.directory if expanded == text else text
        self._schedule: TimedSaves | None = None
        if isinstance(interval, str):
            self._schedule = TimedSaves(parse_duration(interval))
            interval = -1
        self.interval = interval
        self.neighbours = neighbours
        self._checkpointer: Checkpointer | None = None
        self._own = Path()  # with this process's own copies
        self._is_announced = False
        self._session = ""
        self._newest = ""  # name of the copy that was due last
        self._saving = ""  # the same while it is written
        self._written: list[str] = []  # names of copies, oldest first
        self._kept: KeptCopies | None = None
        self._ask_at: float = math.inf  # iteration after which to ask whether all have written it
        self._pause = 1  # iterations from a copy to the first question

    def before_train(self, runner: RunnerProtocol) -> None:
        """Find the copies that are there, and agree on who keeps which."""
        disk = find_disk(self.directory, runner.work_dir, runner.run.run_id)
        self._own = copies_path(disk, runner.processes.index, runner.processes.count)
        # The logs of the iterations up to a copy must not be lost either, if they are written to a
        # bucket
        files = dict(before_seal=runner.run.send_files) if runner.is_main_process else {}
        self._checkpointer = Checkpointer(self._own, runner.run.run_id, alone=True, **files)
        self._is_announced = False
        self._ask_at = math.inf
        place = (socket.gethostname(), self.directory)
        places, sessions = zip(
            *runner.processes.all_gather("local disks", (place, secrets.token_hex(8))), strict=True
        )
        self._session = sessions[0]
        self._kept = KeptCopies(disk, runner.run.run_id, places, self.neighbours, runner.processes)
        # What a run did after the checkpoint that it now continues from, another host had no copy
        # of
        self._kept.tidy(runner.iter)
        self._written = list_names(self._own, runner.iter)
        self._newest = f"iter_{runner.iter}"
        self._pause = runner.train_loop.steps_per_call
        if runner.iter > 0:  # a host that was replaced keeps no copies of others yet
            self._send_after(runner.iter - 1)
        if self._schedule is not None:
            self._schedule.start(runner, runner.iter)

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the next step after which to write a copy, or to send it to a neighbour."""
        if self._schedule is None:
            due: float = self.next_multiple(self.interval, step)
        else:
            due = self._schedule.next_step(runner, step)
        return min(due, max(step, self._ask_at))

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Write a copy if it is due, and send the newest to the neighbours once it is written."""
        if self._schedule is None:
            is_due = self.every_n_train_iters(runner, self.interval)
        else:
            is_due = self._schedule.is_due(runner, runner.iter)
        if is_due:
            with runner.stopwatch.part("checkpoint"):
                self._save(runner, runner.iter + 1)
            # After the save, so that its own time does not count towards the next one.
            if self._schedule is not None:
                self._schedule.start(runner, runner.iter + 1)
        elif runner.iter >= self._ask_at:
            with runner.stopwatch.part("checkpoint"):
                self._send(runner)

    def _save(self, runner: RunnerProtocol, iteration: int) -> None:
        assert self._checkpointer is not None
        assert self._kept is not None
        if self._ask_at < math.inf:
            self._wait(runner)
            wait_for_processes("local copies")  # of which one may have a slower disk
            self._send(runner)
        # All processes have their last copy once they exchange the position in the data, so the one
        # before can go
        self._wait(runner)
        self._newest = f"iter_{iteration}"
        self._send_after(runner.iter)
        try:
            runner.save_checkpoint(
                out_dir=str(self._own),
                filename=self._newest,
                meta={
                    "epoch": runner.epoch,
                    "iter": iteration,
                    "layout": describe_layout(runner.state),
                    "session": self._session,
                },
                by_epoch=False,
                evict=self._written[:-1],
                checkpointer=self._checkpointer,
            )
            if not self._is_announced and runner.is_main_process:
                announce_copies(runner.work_dir, self._announced)
        except CheckpointSaveError as error:
            runner.logger.warning(f"There is no local copy of iteration {iteration}: {error}")
            return
        self._saving = self._newest
        self._is_announced = True

    def _send_after(self, step: int) -> None:
        """Send the newest copy some iterations after `step`."""
        if self._kept is not None and self._kept.has_neighbours:
            self._ask_at = step + self._pause

    def _send(self, runner: RunnerProtocol) -> None:
        """Send the newest copy to the neighbours, if all processes have written theirs."""
        assert self._checkpointer is not None
        assert self._kept is not None
        packed: Packed | None = None
        if not self._checkpointer.is_saving:
            self._wait(runner)
            is_written = self._newest in self._written
            packed = pack(self._own / self._newest) if is_written else Packed()
        # The pause follows the time of a write, and leaves chunks whole
        if self._kept.exchange(packed, self._newest):
            self._ask_at = math.inf
            self._pause = max(self._pause // 2, runner.train_loop.steps_per_call)
        else:
            self._ask_at = runner.iter + self._pause
            self._pause *= 2

    def _wait(self, runner: RunnerProtocol) -> None:
        """Wait for the copies in progress, whose failure is only a warning."""
        if self._checkpointer is None or self._kept is None:
            return
        try:
            self._checkpointer.wait()
            if self._saving:
                self._written = [*self._written[-1:], self._saving]
        except CheckpointSaveError as error:
            runner.logger.warning(f"A local copy could not be written: {error}")
        self._saving = ""
        self._kept.wait()

    # The last copy is finished in any case: after a signal CheckpointHook saves what is newer;
    # after an error a restart may continue from the copy.
    after_train = on_interrupt = on_failure = _wait
