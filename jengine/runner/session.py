"""Create the files of a run, and log and record the start and the end of training."""

import contextlib
from collections.abc import Iterator, Sequence

from jengine.runner import report, run_record
from jengine.runner.failures import handle_failure
from jengine.runner.nonfinite import check_losses
from jengine.runner.runner_protocol import Runner
from jengine.runner.start_report import GroupTable, log_start
from jengine.runner.workdir import CheckpointDirectories


class RunFiles:
    """Create the files of a run once nothing can be refused any more: when its first step or evaluation is traced.

    Args:
      runner: the run; the other arguments are used when the files are created.
      directories: with the checkpoints of other runs, which are moved out of the way of a training.
      problems: why the config file does not reproduce a value, see `report.open_files`.

    Attributes:
      exist: whether the files exist.
    """

    def __init__(self, runner: Runner, directories: CheckpointDirectories, problems: Sequence[str]) -> None:
        self._runner = runner
        self._directories = directories
        self._problems = problems
        self._has_log = False
        self._groups: GroupTable | None = None
        self.exist = False

    def expect_training(self, groups: GroupTable) -> None:
        """Have the next call of `open` also create the record of a training; `groups` is its table of groups."""
        self._groups = groups
        self.exist = False

    def open(self) -> None:
        """Create the files, unless they exist."""
        if self.exist:
            return
        self.exist, runner = True, self._runner
        if not self._has_log:
            self._has_log = True
            report.open_files(runner, self._problems)
        if self._groups is not None:
            if runner.is_main_process:
                for moved in self._directories.claim():
                    runner.logger.warning(f"The checkpoints of another run are now in {moved}.")
            run_record.start_record(runner, *self._groups)
            self._groups = None


@contextlib.contextmanager
def record_session(runner: Runner, groups: GroupTable) -> Iterator[None]:
    """Log and record the start of training, and its end: complete, or by an error or a signal.

    Args:
      runner: about to train; the body trains.
      groups: the table of its parameter groups.
    """
    log_start(runner, groups)
    with runner.interrupts:
        try:
            yield
            check_losses(runner, at_end=True)
        except BaseException as error:
            if runner.files.exist:
                run_record.update_record(runner, f"stopped by {type(error).__name__}")
            handle_failure(runner, error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                report.log_interruption(runner)
            raise
    runner.files.open()  # if a loop of the user ran no step
    report.log_summary(runner)
    run_record.update_record(runner, "finished")
