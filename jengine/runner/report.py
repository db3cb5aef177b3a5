"""What the log says at the start and at the end of training."""

import math
import os
import signal

import jax

from jengine.checkpoint.layout import CorruptCheckpointError, find_latest, read_meta, read_pointer
from jengine.config.errors import ConfigError
from jengine.config.paths import flatten
from jengine.config.plugins import load_each
from jengine.config.storage import StorageError, is_url, storage_path
from jengine.hooks.run import Run
from jengine.hooks.run_record import GroupTable
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.tables import format_table, shorten_rows
from jengine.runner.components import list_directories
from jengine.runner.resume_data import EFFECTS
from jengine.train.state import parameter_size
from jengine.versions import describe_device, environment_versions

# With these limits the description and some warnings have at most 40 lines
_MAX_GROUPS = 8
_MAX_PARAMETERS = 40
_MAX_PATTERNS = 20  # characters, so that the table fits into 80 columns
# without compiling, validation, checkpoints and setup
_TRAINING_PHASES = ("input", "hooks", "step", "logging")

# --- The start ---


def log_start(runner: RunnerProtocol, groups: GroupTable) -> None:
    """Log a description before training, and what the run cannot do as configured.

    The complete tables with parameters, groups and stages have the level DEBUG: the log file has
    them.

    Raises:
      ConfigError: the position in the data cannot be saved, and `resume` is 'exact'.
    """
    run = runner.run
    parameters = [
        [path, str(tuple(leaf.shape)), str(leaf.dtype), f"{math.prod(leaf.shape):,}"]
        for path, leaf in flatten(runner.state.params).items()
    ]
    columns = ["parameter", "shape", "dtype", "size"]
    details = [
        _describe_versions(),
        format_table(columns, shorten_rows(parameters, _MAX_PARAMETERS), title="Parameters"),
        parameter_size(runner.state.params),
        format_table(*groups, title="Parameter groups"),
        "Hooks will be executed in the following order:",
        runner.hook_list.describe(),
    ]
    run.logger.debug("\n".join(details))
    run.logger.info(_describe_start(runner, groups))
    if problems := run.described.problems:
        run.logger.info(f"The config in {run.work_dir} cannot be run again: {'; '.join(problems)}.")
    for check in load_each("start_checks"):
        check(runner)
    loader = runner.train_dataloader
    if loader.resume != "exact":
        effect = EFFECTS[loader.resume]
        advice = loader.advice or "use data with a position"
        if run.resume_is_exact:
            raise ConfigError(
                "`train_dataloader` must be data whose position can be saved with "
                f"resume='exact', got {loader.kind}: {effect}; {advice}"
            )
        run.logger.info(
            f"The position in {loader.kind} cannot be saved: {effect}; for an exact one, {advice}."
        )
    if not run.processes.agree_on_signals:
        run.logger.warning(
            "JAX's preemption service is off (JAX_ENABLE_PREEMPTION_SERVICE): a signal ends a "
            "process at once, and nothing is saved."
        )


def _describe_start(runner: RunnerProtocol, groups: GroupTable) -> str:
    """Return a short description: name, devices, seed, model size, groups, hooks, data, and the
    log path.
    """
    run = runner.run
    columns, rows = groups
    short = [
        [x if len(x) <= _MAX_PATTERNS else f"{x[: _MAX_PATTERNS - 1]}…" for x in row]
        for row in rows
    ]
    path = os.path.join(run.work_dir, run.timestamp, f"{run.timestamp}.log")
    relative = path if is_url(path) else os.path.relpath(path)
    versions = _describe_versions("jax", "python", "platform")
    lines = [
        run.experiment_name,
        f"devices:    {_describe_devices(run)}, {versions}, seed {run.seed}",
        f"model:      {parameter_size(runner.state.params)}",
        *_describe_data(runner),
        f"log:        {path if relative.startswith(os.pardir) else relative} (with all details)",
        format_table(columns, shorten_rows(short, _MAX_GROUPS), title="Parameter groups"),
        runner.hook_list.format_table(),
    ]
    return "\n".join(lines)


def _describe_versions(*names: str) -> str:
    versions = environment_versions()
    return ", ".join(f"{name} {versions[name]}" for name in names or versions)


def _describe_devices(run: Run) -> str:
    kind = describe_device(jax.local_devices()[0])
    description = run.strategy.mesh_description
    mesh = f", mesh {description}" if description else ""
    processes = f", {run.processes.count} processes" if run.processes.count > 1 else ""
    return f"{math.prod(run.strategy.mesh_shape.values())} x {kind}{mesh}{processes}"


def _describe_data(runner: RunnerProtocol) -> list[str]:
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
        if loader.batch_size and runner.run.processes.count > 1:
            shard = runner.run.strategy.data_shard.for_axis(loader.batch_axis)
            size += f" per process, {loader.batch_size * shard.count} in all"
            if len(shard.readers) > 1:
                size += f"; each {len(shard.readers)} processes read the same"
        if name == "train data" and (parts := runner.train_loop.micro_batches) > 1:
            size += f", in {parts} micro-batches"
        lines.append(f"{name + ':':<11} {loader.kind}, {batches}{size}")
    return lines


# --- The end ---


def log_end(runner: RunnerProtocol, iterations: int) -> None:
    """Log the validations, the speed and the file paths after training.

    The hub gets the time by phase and the speed as well.

    Args:
      runner: the run.
      iterations: those of this session.
    """
    scalars, lines = measure_speed(runner, iterations)
    runner.message_hub.update_scalars(scalars, resumed=False)
    runner.visualizer.add_scalars(scalars, step=runner.iter, file_path=f"{runner.timestamp}.json")
    _log_summary(runner, "Training is done.", lines)


def log_interruption(runner: RunnerProtocol, iterations: int) -> None:
    """Log what is saved after a signal and how to continue, then the same as `log_end`."""
    if runner.is_main_process:  # the others would only look for the checkpoints, and log nothing
        # The hub does not get the time: a resumed run will record the total
        lines = measure_speed(runner, iterations)[1]
        _log_summary(runner, describe_interruption(runner), lines)


def _log_summary(runner: RunnerProtocol, headline: str, speed: list[str]) -> None:
    runner.logger.info("\n".join([headline, *speed, list_files(runner.run)]))


def describe_interruption(runner: RunnerProtocol) -> str:
    """Return what is saved, and the command that continues the run."""
    interrupts = runner.run.interrupts
    signum = interrupts.signum
    reason = (
        f" by {'Ctrl-C' if signum == signal.SIGINT else signal.Signals(signum).name}"
        if signum
        else ""
    )
    if interrupts.reason:
        code = 128 + signal.SIGTERM
        reason = f" by {interrupts.reason}, to be started again (exit code {code})"
    at = f"Interrupted{reason} after iteration {runner.iter}"
    try:
        directories = list_directories(runner.work_dir, runner.hooks)
        newest = next(filter(None, map(find_latest, directories)), None)
    except (CorruptCheckpointError, StorageError) as error:
        return f"{at}; {error}"
    if newest is None:
        return f"{at}; nothing is saved: the run has no checkpoint."
    saved = read_meta(newest)["meta"]["iter"]
    lost = f", of iteration {saved}" if saved < runner.iter else ""
    is_default = os.path.dirname(newest) == runner.work_dir
    command = runner.resume_command(None if is_default else newest)
    return f"{at}; saved: {os.path.basename(newest)}{lost}. To continue: {command}"


def list_files(run: Run) -> str:
    """Return the paths of checkpoints, logs and TensorBoard files, one per line."""
    last, _ = read_pointer(storage_path("work_dir", run.work_dir))
    newest = "" if last is None else f" (last: {last.name})"
    log_dir = os.path.join(run.work_dir, run.timestamp)
    vis_dir = os.path.join(log_dir, "vis_data")
    lines = [
        f"checkpoints:  {run.work_dir}{newest}",
        f"log:          {os.path.join(log_dir, run.timestamp + '.log')}",
        f"scalars:      {os.path.join(vis_dir, 'scalars.json')}",
    ]
    local = os.path.join(run.log_dir, "vis_data")
    if os.path.isdir(local) and any("tfevents" in name for name in os.listdir(local)):
        lines.append(f"TensorBoard:  tensorboard --logdir {vis_dir}")
    return "\n".join(lines)


def measure_speed(runner: RunnerProtocol, iterations: int) -> tuple[dict[str, float], list[str]]:
    """Return the time by phase and the speed: scalars, and lines for the log.

    Returns:
      'seconds/<phase>' for each phase, which add up to the time since training began; and, over the
      training time only, 'speed/iterations_per_second', 'speed/examples_per_second' if it is known,
      and what extras add.
    """
    seconds = runner.run.stopwatch.report()
    training = sum(seconds.get(phase, 0.0) for phase in _TRAINING_PHASES)
    speed = iterations / training if training else 0.0
    rates = {}
    if speed:
        rates["iterations_per_second"] = (speed, f"{speed:,.1f} iterations/s")
        loader = runner.train_dataloader
        if loader.batch_size:
            count = runner.train_loop.batches_per_iteration
            count *= runner.run.strategy.data_shard.for_axis(loader.batch_axis).count
            examples = speed * loader.batch_size * count
            rates["examples_per_second"] = (examples, f"{examples:,.0f} examples/s")
    lines = []
    for report in load_each("end_report"):
        more, text = report(runner, seconds, speed)
        rates |= more
        lines += text
    if rates:
        texts = ", ".join(text for _, text in rates.values() if text)
        lines.append(f"{texts}, without compiling, validation and checkpoints")
    scalars = {f"seconds/{phase}": duration for phase, duration in seconds.items()}
    return scalars | {f"speed/{name}": value for name, (value, _) in rates.items()}, lines
