"""Log of a run: lines on the terminal and in the log file, scalars for the visualizer backends."""

import contextlib
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jengine.config.annotations import Count
from jengine.config.json_codec import encode, to_plain
from jengine.config.plugins import load_each
from jengine.config.registry import HOOKS
from jengine.config.storage import apply_backend_args, storage_path
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.console import set_file_handler


@HOOKS.register_module()
class LoggerHook(Hook):
    """Log lines every `interval` iterations and after each validation and test.

    Metrics leave the device only for a log line: those of all past iterations, in one transfer. A
    background thread waits for them and writes the line while training continues.

    In the backends all scalars have the number of completed training iterations as step. JSON lines
    have a `mode`: 'train', 'val' or 'test'.

    Args:
      interval: iterations between two lines, counted from 0 in each epoch.
      ignore_last: do not log the incomplete rest of an epoch, unless the whole epoch is shorter
        than `interval`.
      interval_exp_name: iterations between two lines that repeat the experiment name.
      out_dir: after the run, copy the log files to this directory, into a folder named like the
        work dir. A path or a URL (`gs://`, `s3://`).
      out_suffix: file name endings of the files to copy from the log directory.
      keep_local: False removes the local files after they are copied.
      log_metric_by_epoch: in a loop over epochs, validation and test metrics have the number of
        completed epochs as their step.
      file_handler_cfg: the handler of the log file, see `set_file_handler`. With
        `dict(type='RotatingFileHandler', maxBytes=10**7, backupCount=5)` older lines are in
        `.log.1`, `.log.2`, ...
      file_client_args, backend_args: storage of `out_dir` in MMEngine's terms, see
        `apply_backend_args`.

    Examples:
      >>> hook = LoggerHook(interval=50, out_dir="gs://bucket/logs")
    """

    priority = "BELOW_NORMAL"
    acts_on = "metrics"
    is_single = True

    def __init__(
        self,
        interval: Count = 10,
        ignore_last: bool = True,
        interval_exp_name: Count = 1000,
        out_dir: str | os.PathLike[str] | None = None,
        out_suffix: str | Sequence[str] = (".json", ".log", ".py", "yaml"),
        keep_local: bool = True,
        log_metric_by_epoch: bool = False,
        file_handler_cfg: Mapping[str, Any] | None = None,
        file_client_args: Mapping[str, Any] | None = None,
        backend_args: Mapping[str, Any] | None = None,
    ) -> None:
        out_dir = None if out_dir is None else os.fspath(out_dir)
        out_dir = apply_backend_args("LoggerHook.out_dir", out_dir, backend_args, file_client_args)
        if out_dir is not None:
            storage_path("LoggerHook.out_dir", out_dir)  # refuses what cannot be written
        if out_dir is None and not keep_local:
            raise ValueError(
                "LoggerHook: keep_local=False needs an out_dir, or the logs would be lost"
            )
        self.interval = interval
        self.ignore_last = ignore_last
        self.interval_exp_name = interval_exp_name
        self.out_dir = out_dir
        self.out_suffix = (out_suffix,) if isinstance(out_suffix, str) else tuple(out_suffix)
        self.keep_local = keep_local
        self.log_metric_by_epoch = log_metric_by_epoch
        self.file_handler_cfg = file_handler_cfg
        self._end: float = math.inf

    def before_run(self, runner: RunnerProtocol) -> None:
        """Set the handler of the log file, which is created later."""
        if self.file_handler_cfg is not None:
            set_file_handler(runner.logger, self.file_handler_cfg)

    def before_train(self, runner: RunnerProtocol) -> None:
        """Warn if `log_metric_by_epoch` has no effect."""
        if self.log_metric_by_epoch and not runner.train_loop.by_epoch:
            runner.logger.warning(
                "LoggerHook: log_metric_by_epoch=True has no effect in a loop over iterations, "
                "which has no epochs: the step of validation metrics is the iteration."
            )

    def before_train_epoch(self, runner: RunnerProtocol) -> None:
        """Find the end of the epoch.

        An iteration loop has no epochs: its batch index keeps growing, and its only end is the end
        of training.
        """
        loop = runner.train_loop
        self._end = (loop.epoch_length or math.inf) if loop.by_epoch else runner.max_iters

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Log the iteration if it is due."""
        loop = runner.train_loop
        completed = loop.iter + 1
        by_epoch = loop.by_epoch
        is_last = (batch_idx + 1 if by_epoch else completed) == self._end
        names_run = completed % self.interval_exp_name == 0 or (is_last and by_epoch)
        is_due = (batch_idx + 1) % self.interval == 0 or (
            is_last and (not self.ignore_last or self._end <= self.interval)
        )
        if not (names_run or is_due):
            return
        loop.check()  # raises here, in the thread of the loop
        hub = runner.message_hub
        if (eta := loop.remaining_seconds) is not None:
            hub.update_info("eta", eta)
        runner.stopwatch.enter("logging")
        # in the thread of the log, which waits for the device
        line = batch_idx if is_due else None
        runner.log_writer.submit(_write_lines, runner, _RunnerView(runner), names_run, line)
        hub.pop_info("slowest")  # the line has it
        runner.stopwatch.enter("hooks")

    def after_val_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None, outputs: Any = None
    ) -> None:
        """Log the progress of a validation to the terminal and the log file."""
        self._log_eval_iter(runner, batch_idx, "val")

    def after_test_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None, outputs: Any = None
    ) -> None:
        """Log the progress of a test to the terminal and the log file."""
        self._log_eval_iter(runner, batch_idx, "test")

    def after_val_epoch(
        self, runner: RunnerProtocol, metrics: dict[str, float] | None = None
    ) -> None:
        """Log validation metrics, also to the backends."""
        self._log_pass(runner, runner.val_loop.epoch_length or 0, "val")

    def after_test_epoch(
        self, runner: RunnerProtocol, metrics: dict[str, float] | None = None
    ) -> None:
        """Log test metrics and write them to the backends and to `<timestamp>.json` in the log
        directory.
        """
        last = runner.test_loop.epoch_length or 0
        self._log_pass(runner, last, "test")
        tag, _ = runner.log_processor.get_log_after_epoch(
            runner, last, "test", with_non_scalar=True
        )
        if runner.is_main_process:
            entries = _to_json_entries(tag)
            with open(os.path.join(runner.log_dir, f"{runner.timestamp}.json"), "w") as file:
                file.write(encode(entries, for_logs=True))
            for record in load_each("test_records"):
                record(runner, entries)

    def after_run(self, runner: RunnerProtocol) -> None:
        """Close the backends and copy the log files to `out_dir`."""
        runner.log_writer.flush()
        runner.visualizer.close()  # writers may buffer what is copied next
        if self.out_dir is not None and runner.is_main_process:
            self._copy_logs(runner)

    def _log_pass(self, runner: RunnerProtocol, last: int, mode: Literal["val", "test"]) -> None:
        """Log the metrics of a pass whose last batch has the index `last`, also to the backends."""
        runner.log_writer.flush()  # lines of training come first
        tag, text = runner.log_processor.get_log_after_epoch(runner, last, mode)
        runner.logger.info(text)
        # None in a test alone
        by_epoch = runner.train_loop is not None and runner.train_loop.by_epoch
        progress = (
            {"epoch": runner.epoch, "iter": runner.iter} if by_epoch else {"iter": runner.iter}
        )
        step = runner.epoch if by_epoch and self.log_metric_by_epoch else runner.iter
        scalars = {**tag, **progress, "mode": mode}
        runner.visualizer.add_scalars(scalars, step=step, file_path=f"{runner.timestamp}.json")

    def _log_eval_iter(
        self, runner: RunnerProtocol, batch_idx: int, mode: Literal["val", "test"]
    ) -> None:
        if self.every_n_inner_iters(batch_idx, self.interval):
            _, text = runner.log_processor.get_log_after_iter(runner, batch_idx, mode)
            runner.logger.info(text)

    def _copy_logs(self, runner: RunnerProtocol) -> None:
        assert self.out_dir is not None
        source = storage_path("log_dir", runner.log_dir)
        # `run/` ends in an empty name
        target = storage_path("LoggerHook.out_dir", self.out_dir) / os.path.basename(
            runner.work_dir.rstrip("/")
        )
        for folder, _, files in os.walk(runner.log_dir):
            for name in files:
                if name.endswith(self.out_suffix):
                    path = storage_path("log_dir", os.path.join(folder, name))
                    copy = target / path.relative_to(source)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    path.copy(copy, overwrite=True)  # a resumed run copies the same files again
        runner.logger.info(f"The logs were copied to {target}.")
        if not self.keep_local:
            shutil.rmtree(runner.log_dir)


class _RunnerView:
    """Frozen progress of a runner, for the thread that writes the log.

    The runner has all other attributes.
    """

    def __init__(self, runner: RunnerProtocol) -> None:
        self._runner = runner
        self.message_hub = runner.message_hub.snapshot()  # training goes on while the thread reads
        self.train_loop = runner.train_loop
        self.iter = runner.iter
        self.epoch = runner.epoch
        self.max_iters = runner.max_iters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def _write_lines(
    runner: RunnerProtocol, view: _RunnerView, names_run: bool, batch_idx: int | None
) -> None:
    """Write a line with the experiment name, if wanted, and one with the metrics of a batch index,
    unless it is None.
    """
    if names_run:
        # A `ProgressHook` hides periodic lines from the terminal
        runner.logger.info(f"Exp name: {runner.experiment_name}", extra={"periodic": {}})
    if batch_idx is None:
        view.message_hub.flush()  # which a line does
    else:
        tag, text = runner.log_processor.get_log_after_iter(view, batch_idx, "train")
        _log_line(runner.logger, text, tag)
        scalars = {**tag, "mode": "train"}
        runner.visualizer.add_scalars(
            scalars, step=view.iter + 1, file_path=f"{runner.timestamp}.json"
        )


def _log_line(logger: logging.Logger, text: str, tag: Mapping[str, Any]) -> None:
    """Log a line of training, without a search for the caller, which takes as long as formatting
    the line.
    """
    if logger.isEnabledFor(logging.INFO):
        record = logging.LogRecord(logger.name, logging.INFO, __file__, 0, text, (), None)
        record.periodic = tag  # read by a `ProgressHook`
        logger.handle(record)


def _to_json_entries(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that JSON can store, without those that are None."""
    found = {}
    for name, value in tag.items():
        with contextlib.suppress(TypeError):  # some entries are objects that only Python has
            if value is not None:
                found[name] = to_plain(value, for_logs=True)
    return found
