"""Write the log: lines to the terminal and the log file, scalars to the visualizer's backends."""

import contextlib
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jengine.annotations import Count
from jengine.errors import ConfigError
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.json_codec import encode, to_plain
from jengine.registry import HOOKS
from jengine.train.scanned_step import ChunkMetrics


@HOOKS.register_module()
class LoggerHook(Hook):
    """Log every `interval` iterations and after each validation and test.

    Metrics leave the device only for a log line: those of all past iterations, in one transfer. A background thread
    waits for them and writes the line while training continues.

    In the backends the step of all scalars is the number of completed training iterations. The JSON lines of the
    visualizer have a `mode`: 'train', 'val' or 'test'.

    Args:
      interval: iterations between two lines, counted from 0 in each epoch.
      ignore_last: do not log the incomplete rest of an epoch, unless the whole epoch is shorter than `interval`.
      interval_exp_name: iterations between two lines that repeat the experiment's name.
      out_dir: copy the log files to a folder named like the work dir in this directory after the run. A path or a URL
        that `etils.epath` opens (`gs://`, `s3://`).
      out_suffix: file name endings of the files to copy from the log directory.
      keep_local: False removes the local files after they are copied.
      log_metric_by_epoch: in a loop over epochs, use the number of completed epochs as the step of validation and test
        metrics.
      file_client_args, backend_args: arguments of MMEngine; must be None, see `out_dir`.

    Raises:
      TypeError: `interval` is not an integer. ValueError: it is not positive.
    """

    priority = "BELOW_NORMAL"
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
        file_client_args: Mapping[str, Any] | None = None,
        backend_args: Mapping[str, Any] | None = None,
    ) -> None:
        if file_client_args is not None or backend_args is not None:
            raise ConfigError(
                "LoggerHook: backend_args and file_client_args must be None; the storage is chosen by out_dir, "
                "a path or a URL (gs://, s3://)"
            )
        if out_dir is None and not keep_local:
            raise ValueError("LoggerHook: keep_local=False needs an out_dir, or the logs would be lost")
        self.interval = interval
        self.ignore_last = ignore_last
        self.interval_exp_name = interval_exp_name
        self.out_dir = out_dir
        self.out_suffix = (out_suffix,) if isinstance(out_suffix, str) else tuple(out_suffix)
        self.keep_local = keep_local
        self.log_metric_by_epoch = log_metric_by_epoch

    def before_train(self, runner: Runner) -> None:
        """Warn if `log_metric_by_epoch` has no effect."""
        if self.log_metric_by_epoch and not runner.train_loop.by_epoch:
            runner.logger.warning(
                "LoggerHook: log_metric_by_epoch=True has no effect in a loop over iterations, which has no epochs: "
                "the step of validation metrics is the iteration."
            )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Log the iteration if it is due."""
        self._log_train(runner, batch_idx, 1)

    def after_train_chunk(self, runner: Runner, batch_idx: int, data_batch: Any, metrics: ChunkMetrics) -> None:
        """Log the iterations of a chunk that are due."""
        self._log_train(runner, batch_idx, metrics.num_steps)

    def _log_train(self, runner: Runner, batch_idx: int, count: int) -> None:
        """Log the iterations that are due among the last `count`."""
        loop, iteration = runner.train_loop, runner.iter
        by_epoch = loop.by_epoch
        # An iteration loop has no epochs: its batch index keeps growing, and its only end is the end of training.
        end = (loop.epoch_length or math.inf) if by_epoch else runner.max_iters
        lines: list[tuple[int, int | None]] = []
        for offset in range(count - 1, -1, -1):
            completed, inner = iteration - offset + 1, batch_idx - offset + 1
            is_last = (inner if by_epoch else completed) == end
            if completed % self.interval_exp_name == 0 or (is_last and by_epoch):
                lines.append((completed - 1, None))
            if inner % self.interval == 0 or (is_last and (not self.ignore_last or end <= self.interval)):
                lines.append((completed - 1, inner - 1))
        if lines:
            loop.check()
            with runner.phase_timer.phase("logging"):
                runner.log_writer.submit(_write_lines, runner, _RunnerView(runner), lines)

    def after_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Log the progress of a validation to the terminal and the log file."""
        self._log_eval_iter(runner, batch_idx, "val")

    def after_test_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Log the progress of a test to the terminal and the log file."""
        self._log_eval_iter(runner, batch_idx, "test")

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Log the metrics of a validation, also to the backends."""
        runner.log_writer.flush()
        tag, text = runner.log_processor.get_log_after_epoch(runner, runner.val_loop.epoch_length or 0, "val")
        runner.logger.info(text)
        self._add_metrics(runner, tag, "val")

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Log the metrics of a test and write them to the backends and to `<timestamp>.json` in the log directory."""
        runner.log_writer.flush()
        last = runner.test_loop.epoch_length or 0
        tag, text = runner.log_processor.get_log_after_epoch(runner, last, "test", with_non_scalar=True)
        runner.logger.info(text)
        self._add_metrics(runner, runner.log_processor.get_log_after_epoch(runner, last, "test")[0], "test")
        if runner.is_main_process:
            with open(os.path.join(runner.log_dir, f"{runner.timestamp}.json"), "w") as file:
                file.write(encode(_to_json_entries(tag), for_logs=True))

    def after_run(self, runner: Runner) -> None:
        """Close the backends and copy the log files to `out_dir`."""
        runner.log_writer.flush()
        runner.visualizer.close()
        if self.out_dir is not None and runner.is_main_process:
            self._copy_logs(runner)

    def _add_metrics(self, runner: Runner, tag: Mapping[str, Any], mode: Literal["val", "test"]) -> None:
        """Write the metrics of a validation or a test to the backends."""
        by_epoch = runner.train_loop is not None and runner.train_loop.by_epoch
        progress = {"epoch": runner.epoch, "iter": runner.iter} if by_epoch else {"iter": runner.iter}
        step = runner.epoch if by_epoch and self.log_metric_by_epoch else runner.iter
        scalars = {**tag, **progress, "mode": mode}
        runner.visualizer.add_scalars(scalars, step=step, file_path=f"{runner.timestamp}.json")

    def _log_eval_iter(self, runner: Runner, batch_idx: int, mode: Literal["val", "test"]) -> None:
        if self.every_n_inner_iters(batch_idx, self.interval):
            _, text = runner.log_processor.get_log_after_iter(runner, batch_idx, mode)
            runner.logger.info(text)

    def _copy_logs(self, runner: Runner) -> None:
        from etils import epath

        assert self.out_dir is not None
        source = epath.Path(runner.log_dir)
        target = epath.Path(self.out_dir) / os.path.basename(runner.work_dir.rstrip("/"))
        for folder, _, files in os.walk(runner.log_dir):
            for name in files:
                if name.endswith(self.out_suffix):
                    path = epath.Path(folder) / name
                    copy = target / path.relative_to(source)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    path.copy(copy, overwrite=True)
        runner.logger.info(f"The logs were copied to {target}.")
        if not self.keep_local:
            shutil.rmtree(runner.log_dir)


class _RunnerView:
    """Freeze the progress of a runner, for the thread that writes the log; other attributes are the runner's."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.message_hub = runner.message_hub.snapshot()
        self.train_loop, self.iter, self.epoch = runner.train_loop, runner.iter, runner.epoch
        self.max_iters = runner.max_iters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def _write_lines(runner: Runner, view: _RunnerView, lines: Sequence[tuple[int, int | None]]) -> None:
    """Write log lines: `(iteration, batch index)` for its metrics, `(iteration, None)` for the experiment's name."""
    try:
        for iteration, batch_idx in lines:
            view.iter = iteration
            if batch_idx is None:
                runner.logger.info(f"Exp name: {runner.experiment_name}", extra={"periodic": {}})
                continue
            view.message_hub.flush(iteration)
            tag, text = runner.log_processor.get_log_after_iter(view, batch_idx, "train")
            runner.logger.info(text, extra={"periodic": tag})
            scalars = {**tag, "mode": "train"}
            runner.visualizer.add_scalars(scalars, step=iteration + 1, file_path=f"{runner.timestamp}.json")
    finally:
        view.message_hub.flush()


def _to_json_entries(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that JSON has a form for, in its types, without those that are None."""
    found = {}
    for name, value in tag.items():
        with contextlib.suppress(TypeError):
            found[name] = to_plain(value, for_logs=True)
    return {name: value for name, value in found.items() if value is not None}
