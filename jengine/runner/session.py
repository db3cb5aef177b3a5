"""Log and record the start and the end of training."""

import contextlib
from collections.abc import Iterator

from jengine.runner import report, run_record
from jengine.runner.failures import handle_failure
from jengine.runner.nonfinite import check_losses
from jengine.runner.runner_protocol import Runner
from jengine.runner.start_report import GroupTable, log_start


@contextlib.contextmanager
def record_session(runner: Runner, groups: GroupTable) -> Iterator[None]:
    """Log and record the start of training, and its end: complete, or by an error or a signal.

    Args:
      runner: about to train; the body trains.
      groups: the table of its parameter groups.
    """
    log_start(runner, groups)
    run_record.start_record(runner, *groups)
    with runner.interrupts:
        try:
            yield
            check_losses(runner, at_end=True)
        except BaseException as error:
            run_record.update_record(runner, f"stopped by {type(error).__name__}")
            handle_failure(runner, error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                report.log_interruption(runner)
            raise
    report.log_summary(runner)
    run_record.update_record(runner, "finished")
