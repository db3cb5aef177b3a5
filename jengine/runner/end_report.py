"""Report at the end of a run: the validation table, the time by phase, the speed, and the paths of its files."""

import contextlib
import math
import os
import pathlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jengine.checkpoint import find_latest, infer_rule, read_meta
from jengine.config import format_config, write_config
from jengine.errors import ConfigError
from jengine.logging import format_table, open_log_file
from jengine.runner.failures import is_consistent, recreate_work_dir
from jengine.runner.runner_protocol import Runner
from jengine.train.peak_flops import compute_utilisation

_EVENTS = {"/jax/compilation_cache/cache_hits": "hits", "/jax/compilation_cache/cache_misses": "misses"}
_counts = {"hits": 0, "misses": 0}
_is_listening = False


def use_compilation_cache() -> None:
    """Store compiled programs in the user's cache directory, unless JAX is configured otherwise.

    `JAX_COMPILATION_CACHE_DIR` selects another directory, `JAX_ENABLE_COMPILATION_CACHE=false` disables the cache.
    """
    global _is_listening
    if not _is_listening:
        jax.monitoring.register_event_listener(_count_event)
        _is_listening = True
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] is None and settings["jax_enable_compilation_cache"]:
        root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(root) / "jengine" / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def cache_counts() -> tuple[int, int]:
    """Return the number of cache hits and of cache misses of this process."""
    return _counts["hits"], _counts["misses"]


def _count_event(event: str, **_: object) -> None:
    if event in _EVENTS:
        _counts[_EVENTS[event]] += 1


_MAX_ROWS = 20

Validation = tuple[int, int, Mapping[str, Any]]


def format_validations(
    validations: Sequence[Validation], *, by_epoch: bool, monitored: Iterable[tuple[str, str]] = ()
) -> str:
    """Return a table with a row for each validation and the metrics that are best in it.

    A long table is cut in the middle; the best rows are always shown. Of equal values the last is the best.

    Args:
      validations: epoch, iteration and metrics of each.
      by_epoch: whether to show the epochs, besides the iterations.
      monitored: the metrics to compare, and for each whether its 'greater' or 'less' value is better. If none of them
        was returned, the first metric from whose name the rule can be inferred.
    """
    names = list(dict.fromkeys(name for _, _, metrics in validations for name in metrics))
    rules = {name: rule for name, rule in monitored if name in names} or _infer_first(names)
    best: dict[int, list[str]] = {}
    for name, rule in rules.items():
        if (index := _find_best([metrics.get(name) for _, _, metrics in validations], rule)) is not None:
            best.setdefault(index, []).append(name)
    rows = [
        [str(epoch), str(iteration), *(_format_number(metrics.get(name)) for name in names), ", ".join(best.get(i, []))]
        for i, (epoch, iteration, metrics) in enumerate(validations)
    ]
    first, last = 0 if by_epoch else 1, None if best else -1
    rows = _cut_middle([row[first:last] for row in rows], best)
    return format_table(["epoch", "iter", *names, "best"][first:last], rows, title="Validations")


def _infer_first(names: Sequence[str]) -> dict[str, str]:
    for name in names:
        with contextlib.suppress(ValueError):
            return {name: infer_rule(name)}
    return {}


def _find_best(values: Sequence[Any], rule: str) -> int | None:
    """Return the index of the best number; None if there is none."""
    sign = 1 if rule == "greater" else -1
    scores = [(sign * value, i) for i, value in enumerate(values) if _is_number(value)]
    return max(scores)[1] if scores else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _cut_middle(rows: Sequence[list[str]], kept: Iterable[int]) -> list[list[str]]:
    """Return the first and the last rows and those of `kept`, with the number of rows left out at each gap."""
    half = _MAX_ROWS // 2
    if len(rows) <= _MAX_ROWS:
        return list(rows)
    shown = sorted({*range(half), *kept, *range(len(rows) - half, len(rows))})
    result = []
    for previous, index in zip([-1, *shown], shown, strict=False):
        if gap := index - previous - 1:
            result.append([f"… {gap} more …", *[""] * (len(rows[0]) - 1)])
        result.append(rows[index])
    return result


def _format_number(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


_TRAINING_PHASES = ("input", "hooks", "step", "logging")  # without compiling, validation, checkpoints and setup


def wait_for_device(runner: Runner) -> None:
    """Wait until all dispatched steps are finished. The time is that of the step, whatever the caller waits for."""
    with runner.phase_timer.phase("step"):
        runner.dispatch_limiter.drain()


def measure_speed(runner: Runner) -> dict[str, float]:
    """Return the time of a run by phase, and its speed, as scalars.

    Args:
      runner: after training.

    Returns:
      'seconds/<phase>' for each phase, which add up to the time since training began; and, over the time of training
      only, 'speed/iterations_per_second', 'speed/examples_per_second' if the size of a batch is known,
      'speed/flops_per_second' over all devices if the operations of the step can be counted, and
      'speed/model_flops_utilisation' if the peak of the devices is known.
    """
    seconds = runner.phase_timer.report()
    scalars = {f"seconds/{phase}": duration for phase, duration in seconds.items()}
    training = sum(seconds.get(phase, 0.0) for phase in _TRAINING_PHASES)
    if runner.iters_this_session == 0 or training == 0.0:
        return scalars
    speed = runner.iters_this_session / training
    scalars["speed/iterations_per_second"] = speed
    if batch_size := runner.train_dataloader.batch_size:
        scalars["speed/examples_per_second"] = speed * batch_size * runner.strategy.data_shard.count
    flops = runner.programs.flops()
    if flops:
        scalars["speed/flops_per_second"] = speed * sum(flops.values())
    assert runner.state is not None
    devices: set[Any] = runner.state.step.sharding.device_set
    kind = next(iter(devices)).device_kind
    if (share := compute_utilisation(flops, 1.0 / speed, kind, len(devices))) is not None:
        scalars["speed/model_flops_utilisation"] = share
    return scalars


def format_speed(scalars: Mapping[str, float]) -> str:
    """Return a table of the time by phase, followed by a line with the speed.

    Args:
      scalars: as returned by `measure_speed`.
    """
    seconds = {name.removeprefix("seconds/"): value for name, value in scalars.items() if name.startswith("seconds/")}
    total = sum(seconds.values())
    rows = [[phase, f"{value:.2f}", f"{value / total:.1%}"] for phase, value in seconds.items()]
    table = format_table(["part", "seconds", "share"], [*rows, ["all", f"{total:.2f}", "100.0%"]], title="Time")
    hits, misses = cache_counts()
    lines = [table, f"compilation cache: {hits} programs found, {misses} compiled"]
    formats: dict[str, Callable[[float], str]] = {
        "iterations_per_second": "{:,.1f} iterations/s".format,
        "examples_per_second": "{:,.0f} examples/s".format,
        "flops_per_second": _format_flops,
        "model_flops_utilisation": "{:.1%} of the devices' peak".format,
    }
    speeds = [format_(scalars[f"speed/{name}"]) for name, format_ in formats.items() if f"speed/{name}" in scalars]
    if speeds:
        lines.append(f"{', '.join(speeds)}, without compiling, validation and checkpoints")
    return "\n".join(lines)


def _format_flops(value: float) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:,.1f} {prefix}FLOP/s"
    return f"{value:,.0f} FLOP/s"


def format_config_file(cfg: Mapping[str, Any], work_dir: str | os.PathLike[str]) -> tuple[str, list[str]]:
    """Return the text of the config file in the work dir ('' without a config), and why it does not reproduce it."""
    return format_config(cfg, os.path.join(work_dir, "config.py")) if cfg else ("", [])


def open_files(runner: Runner, problems: Sequence[str]) -> None:
    """Open the log file, write the config to the work dir and the visualizer, and warn if it cannot be run again.

    Args:
      runner: nothing is refused any more.
      problems: why the config file does not reproduce a value, see `format_config`.

    Raises:
      ConfigError: the work dir cannot be written.
    """
    try:
        open_log_file(runner.logger)
    except OSError as error:
        raise ConfigError(f"`work_dir` must be writable, got {runner.work_dir}: {error}") from error
    if not runner.cfg_text or not runner.is_main_process:
        return
    write_config(runner.cfg_text, os.path.join(runner.work_dir, "config.py"))
    runner.visualizer.add_config(runner.cfg_text)
    if problems:
        runner.logger.warning(f"The config in {runner.work_dir} cannot be run again: {'; '.join(problems)}.")


def log_summary(runner: Runner) -> None:
    """Log the validations of a run, its time by phase, and the paths of its files; record the time in the hub too.

    Args:
      runner: after training; its last checkpoint may still be pending.
    """
    _finish(runner)
    recreate_work_dir(runner)
    scalars = measure_speed(runner)
    runner.message_hub.update_scalars(scalars, resumed=False)
    runner.visualizer.add_scalars(scalars, step=runner.iter, file_path=f"{runner.timestamp}.json")
    _log_summary(runner, "Training is done.", scalars)


def log_interruption(runner: Runner) -> None:
    """Log what is saved of an interrupted run and how to continue it, then the same as `log_summary`.

    The time is not recorded: the continued run records that of the whole run.

    Args:
      runner: after a signal, its completed iterations saved; the save may still be pending.
    """
    if runner.processes.count > 1 and not runner.interrupts.agreed:
        return  # it ends without the other processes
    if not is_consistent(runner):  # a second signal, within an iteration
        runner.logger.warning(f"{_describe_interruption(runner)}\n{list_files(runner)}")
        return
    try:
        _finish(runner)
    except Exception as error:  # the run ends in any case
        runner.logger.error(f"The run could not be completed: {type(error).__name__}: {error}")
    if runner.is_main_process:  # the others would only look for the checkpoints, and log nothing
        _log_summary(runner, _describe_interruption(runner), measure_speed(runner))


def _describe_interruption(runner: Runner) -> str:
    """Return what is saved, and the command that continues the run."""
    signum = runner.interrupts.signum
    reason = f" by {'Ctrl-C' if signum == signal.SIGINT else signal.Signals(signum).name}" if signum else ""
    at = f"Interrupted{reason} after iteration {runner.iter}"
    directories = [runner.work_dir, *(path for hook in runner.hooks for path in hook.list_directories(runner.work_dir))]
    newest = next((path for path in map(find_latest, directories) if path is not None), None)
    if newest is None:
        return f"{at}; nothing is saved: the run has no checkpoint."
    saved = read_meta(newest)["meta"]["iter"]
    lost = f", of iteration {saved}" if saved < runner.iter else ""
    is_default = pathlib.Path(newest).parent == pathlib.Path(runner.work_dir)
    command = runner.resume_command(None if is_default else str(newest))
    return f"{at}; saved: {os.path.basename(newest)}{lost}. To continue: {command}"


def _finish(runner: Runner) -> None:
    """Wait for the steps, the saves and the log lines that are pending."""
    wait_for_device(runner)
    with runner.phase_timer.phase("checkpoint"):
        runner.checkpointer.wait()
    with runner.phase_timer.phase("logging"):
        runner.log_writer.flush()


def _log_summary(runner: Runner, headline: str, scalars: Mapping[str, float]) -> None:
    table = [_validation_table(runner)] if runner.validations else []
    runner.logger.info("\n".join([headline, *table, format_speed(scalars), list_files(runner)]))


def _validation_table(runner: Runner) -> str:
    monitored = [(name, rule) for hook in runner.hooks for _, name, rule in hook.monitored_metrics()]
    return format_validations(runner.validations, by_epoch=runner.train_loop.by_epoch, monitored=monitored)


def list_files(runner: Runner) -> str:
    """Return the paths of checkpoints, logs and TensorBoard files, one per line."""
    lines = [f"checkpoints:  {runner.work_dir}"]
    last = os.path.join(runner.work_dir, "last_checkpoint")
    if os.path.exists(last):
        with open(last) as file:
            lines = [f"checkpoints:  {runner.work_dir} (last: {os.path.basename(file.read().strip())})"]
    lines.append(f"log:          {os.path.join(runner.log_dir, runner.timestamp + '.log')}")
    vis_dir = os.path.join(runner.log_dir, "vis_data")
    lines.append(f"scalars:      {os.path.join(vis_dir, 'scalars.json')}")
    if os.path.isdir(vis_dir) and any("tfevents" in name for name in os.listdir(vis_dir)):
        lines.append(f"TensorBoard:  tensorboard --logdir {vis_dir}")
    return "\n".join(lines)
