"""Sessions of a run: what is logged and recorded when training starts and ends, and when files
are created.
"""

import contextlib
import functools
import math
import os
import signal
from collections.abc import Iterator, Sequence

import jax

from jengine.checkpoint.directories import CheckpointDirectories
from jengine.checkpoint.layout import CURRENT_RUN, POINTER
from jengine.checkpoint.lock_holder import LOCK
from jengine.config.dump import write_config
from jengine.config.errors import ConfigError
from jengine.config.paths import flatten
from jengine.config.storage import LocalFiles, find_scheme, is_url
from jengine.hooks.run_record import GroupTable, start_record, update_record
from jengine.logging.console import open_log_file
from jengine.logging.tables import format_table, shorten_rows
from jengine.runner.components import has_own_step
from jengine.runner.failures import check_losses, handle_failure
from jengine.runner.resume_data import warn_if_inexact
from jengine.runner.runner_protocol import RunnerInternals
from jengine.train.state import parameter_size
from jengine.versions import describe_device, environment_versions

# With these limits the description and some warnings have at most 40 lines
_MAX_GROUPS = 8
_MAX_PARAMETERS = 40
_MAX_PATTERNS = 20  # characters, so that the table fits into 80 columns


@contextlib.contextmanager
def record_session(runner: RunnerInternals, groups: GroupTable) -> Iterator[None]:
    """Log and record the start and the end of training, which runs inside: complete, or by an
    error or a signal.
    """
    from jengine.runner.end_report import log_interruption, log_summary

    log_start(runner, groups)  # outside the handler: a refusal is no failed training
    with runner.interrupts:
        elapsed = sum(runner.stopwatch.report().values())  # since the call of `train`
        try:
            with runner.interrupts.limit_time(runner.train_loop.settings.max_time, elapsed):
                yield
            check_losses(runner, at_end=True)  # those that no log line has fetched
        except BaseException as error:
            if runner.files.exist:
                signum = runner.interrupts.signum
                cause = signal.Signals(signum).name if signum else type(error).__name__
                update_record(runner, f"stopped by {cause}")
            handle_failure(runner, error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                log_interruption(runner)
            raise
    runner.files.open()  # if a loop of the user ran no step
    log_summary(runner)  # after the files exist: it writes scalars
    update_record(runner, "finished")


class RunFiles:
    """Files of a run, created when the first step or evaluation is traced: nothing can be refused
    any more.

    Args:
      runner: the run.
      directories: where checkpoints go; those of earlier runs are moved aside.
      problems: why the config file does not reproduce a value, see `format_config`.
    """

    def __init__(
        self, runner: RunnerInternals, directories: CheckpointDirectories, problems: Sequence[str]
    ) -> None:
        self._runner = runner
        self._directories = directories
        self._problems = problems
        self._has_log = False  # a second call of `train` keeps it
        self._groups: GroupTable | None = None
        self.exist = False
        self._local = LocalFiles()
        if (scheme := find_scheme(runner.work_dir)) is not None:
            check = functools.partial(directories.check_locks, before_write=True)
            self._local = scheme.send_files(runner.local_dir, runner.work_dir, check)

    def check(self, *, before_write: bool = False) -> None:
        """Raise WorkDirLockedError if another run has taken a directory over."""
        self._directories.check_locks(before_write=before_write)

    def fetch(self) -> None:
        """Fetch the files of the run that this one continues, if they are at a URL."""
        if self._runner.is_main_process:
            self._local.fetch(self._runner.timestamp, skip=(LOCK, POINTER, CURRENT_RUN))

    def send(self) -> None:
        """Send the files that have changed, if the work dir is a URL; only a lost lock is an error.

        A checkpoint is sealed next, which must not be ahead of the log.
        """
        self.check(before_write=True)
        self._local.send_all()

    def close(self, *, keep: bool) -> None:
        """Send the rest of the files.

        Without `keep` the local files may be removed at the end of the process.
        """
        self._local.close(keep=keep)

    def expect_training(self, groups: GroupTable) -> None:
        """Have the next call of `open` also create the record of a training with these parameter
        groups.
        """
        self._groups = groups
        self.exist = False

    def open(self) -> None:
        """Create the files, unless they exist.

        Raise ConfigError if the work dir cannot be written.
        """
        self._local.start()
        if self.exist:
            return
        self.exist = True
        runner = self._runner
        if not self._has_log:
            self._has_log = True
            self._open_logs()
        if self._groups is not None:
            if runner.is_main_process:
                # only now: nothing refuses this run any more
                for moved in self._directories.claim():
                    runner.logger.warning(f"The checkpoints of another run are now in {moved}.")
            start_record(runner, self._groups)
            self._groups = None

    def _open_logs(self) -> None:
        runner = self._runner
        try:
            open_log_file(runner.logger)
        except OSError as error:
            raise ConfigError(
                f"`work_dir` must be writable, got {runner.work_dir}: {error}"
            ) from error
        if runner.cfg_text and runner.is_main_process:
            write_config(runner.cfg_text, os.path.join(runner.local_dir, "config.py"))
            runner.visualizer.add_config(runner.cfg_text)
            if self._problems:
                problems = "; ".join(self._problems)
                runner.logger.info(
                    f"The config in {runner.work_dir} cannot be run again: {problems}."
                )


def log_start(runner: RunnerInternals, groups: GroupTable) -> None:
    """Log a description before training, and what the run cannot do as configured.

    The complete tables with parameters, groups and stages have the level DEBUG: the log file has
    them.

    Raises:
      ConfigError: the position in the data cannot be saved, and `resume` is 'exact'.
    """
    parameters = [
        [path, str(tuple(leaf.shape)), str(leaf.dtype), f"{math.prod(leaf.shape):,}"]
        for path, leaf in flatten(runner.state.params).items()
    ]
    columns = ["parameter", "shape", "dtype", "size"]
    details = [
        _describe_versions(),
        format_table(columns, shorten_rows(parameters, _MAX_PARAMETERS), title="Parameters"),
        parameter_size(runner.state.params),
        format_groups(*groups),
        "Hooks will be executed in the following order:",
        runner.get_hooks_info(),
    ]
    runner.logger.debug("\n".join(details))
    runner.logger.info(describe_start(runner, groups))
    steps_per_call = runner.train_loop.steps_per_call
    blockers = runner.hook_list.list_chunk_blockers(runner)
    if steps_per_call > 1 and blockers:
        names = ", ".join(type(hook).__name__ for hook in blockers)
        runner.logger.warning(
            f"steps_per_call={steps_per_call} has no effect: {names} may act at each step; "
            "iterations run one by one. To allow chunks, set `every` or `acts_on`."
        )
    traced = [type(hook).__name__ for hook in runner.hooks if hook.get_traced_points()]
    if has_own_step(runner) and traced:
        runner.logger.warning(
            f"{type(runner).__name__}.train_step replaces the built-in step: the traced points of "
            f"{', '.join(traced)} have no effect unless it calls `super().train_step(batch)`. A "
            "`train_step` of the model runs them."
        )
    warn_if_inexact(runner)
    if not runner.processes.agree_on_signals:
        runner.logger.warning(
            "JAX's preemption service is off (JAX_ENABLE_PREEMPTION_SERVICE): a signal ends a "
            "process at once, and nothing is saved."
        )


def describe_start(runner: RunnerInternals, groups: GroupTable) -> str:
    """Return a short description: name, devices, seed, model size, groups, hooks, data, and the
    log path.
    """
    columns, rows = groups
    short = [
        [x if len(x) <= _MAX_PATTERNS else f"{x[: _MAX_PATTERNS - 1]}…" for x in row]
        for row in rows
    ]
    path = os.path.join(runner.work_dir, runner.timestamp, f"{runner.timestamp}.log")
    relative = path if is_url(path) else os.path.relpath(path)
    versions = _describe_versions("jax", "python", "platform")
    lines = [
        runner.experiment_name,
        f"devices:    {_describe_devices(runner)}, {versions}, seed {runner.seed}",
        f"model:      {parameter_size(runner.state.params)}",
        *_describe_data(runner),
        f"log:        {path if relative.startswith(os.pardir) else relative} (with all details)",
        format_groups(columns, shorten_rows(short, _MAX_GROUPS)),
        runner.hook_list.format_table(),
    ]
    return "\n".join(lines)


def format_groups(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table with parameter groups as text."""
    return format_table(columns, rows, title="Parameter groups")


def _describe_versions(*names: str) -> str:
    versions = environment_versions()
    return ", ".join(f"{name} {versions[name]}" for name in names or versions)


def _describe_devices(runner: RunnerInternals) -> str:
    kind = describe_device(jax.local_devices()[0])
    mesh_shape = runner.strategy.mesh_shape
    description = runner.strategy.mesh_description
    mesh = f", mesh {description}" if description else ""
    processes = f", {runner.processes.count} processes" if runner.processes.count > 1 else ""
    return f"{math.prod(mesh_shape.values())} x {kind}{mesh}{processes}"


def _describe_data(runner: RunnerInternals) -> list[str]:
    """Return a line for the training data, and one for the validation data if there are any."""
    loaders = {"train data": runner.train_dataloader}
    loader = runner.val_dataloader
    evaluated = loader if isinstance(loader, dict) else {} if loader is None else {"": loader}
    loaders |= {f"val {name or 'data'}": loader for name, loader in evaluated.items()}
    lines = []
    for name, loader in loaders.items():
        batches = "length unknown" if loader.length is None else f"{loader.length:,} batches"
        size = f" of {loader.batch_sizes or loader.batch_size}" if loader.batch_size else ""
        if loader.example_lengths is not None:
            size += f", with examples of length {loader.example_lengths}"
        if loader.batch_size and runner.processes.count > 1:
            shard = runner.strategy.data_shard.for_axis(loader.batch_axis)
            size += f" per process, {loader.batch_size * shard.count} in all"
            if len(shard.readers) > 1:
                size += f"; each {len(shard.readers)} processes read the same"
        if name == "train data" and (parts := runner.train_loop.micro_batches) > 1:
            size += f", in {parts} micro-batches"
        lines.append(f"{name + ':':<11} {loader.kind}, {batches}{size}")
    return lines
