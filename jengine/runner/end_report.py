"""Report at the end of a run: the validation table, the time by phase, the speed, and the file paths."""

import contextlib
import math
import os
import pathlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jengine.checkpoint import find_latest, infer_rule, read_meta
from jengine.logging import format_table
from jengine.runner.failures import is_consistent, list_directories, recreate_work_dir
from jengine.runner.runner_protocol import RunnerInternals
from jengine.train.peak_flops import compute_utilisation

Validation = tuple[int, int, Mapping[str, Any]]

_MAX_ROWS = 20
_TRAINING_PHASES = ("input", "hooks", "step", "logging")  # without compiling, validation, checkpoints and setup
_CACHE_EVENTS = {"/jax/compilation_cache/cache_hits": "hits", "/jax/compilation_cache/cache_misses": "misses"}
_cache_counts = {"hits": 0, "misses": 0}
_is_listening = False

# --- Logged after training ---


def log_summary(runner: RunnerInternals) -> None:
    """Log the validations, the time by phase and the file paths after training; the hub gets the time as well."""
    _finish(runner)
    recreate_work_dir(runner)
    scalars = measure_speed(runner)
    runner.message_hub.update_scalars(scalars, resumed=False)
    runner.visualizer.add_scalars(scalars, step=runner.iter, file_path=f"{runner.timestamp}.json")
    _log_summary(runner, "Training is done.", scalars)


def log_interruption(runner: RunnerInternals) -> None:
    """Log what is saved after a signal and how to continue, then the same as `log_summary`."""
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
        # The hub does not get the time: a resumed run will record the total
        _log_summary(runner, _describe_interruption(runner), measure_speed(runner))


def _finish(runner: RunnerInternals) -> None:
    """Wait for pending steps, saves and log lines."""
    wait_for_device(runner)
    with runner.phase_timer.phase("checkpoint"):
        runner.checkpointer.wait()
    with runner.phase_timer.phase("logging"):
        runner.log_writer.flush()


def _log_summary(runner: RunnerInternals, headline: str, scalars: Mapping[str, float]) -> None:
    parts = [headline, format_speed(scalars), list_files(runner)]
    if runner.validations:
        monitored = [(name, rule) for hook in runner.hooks for _, name, rule in hook.monitored_metrics()]
        by_epoch = runner.train_loop.by_epoch
        parts.insert(1, format_validations(runner.validations, by_epoch=by_epoch, monitored=monitored))
    runner.logger.info("\n".join(parts))


def _describe_interruption(runner: RunnerInternals) -> str:
    """Return what is saved, and the command that continues the run."""
    signum = runner.interrupts.signum
    reason = f" by {'Ctrl-C' if signum == signal.SIGINT else signal.Signals(signum).name}" if signum else ""
    at = f"Interrupted{reason} after iteration {runner.iter}"
    newest = next((path for path in map(find_latest, list_directories(runner)) if path is not None), None)
    if newest is None:
        return f"{at}; nothing is saved: the run has no checkpoint."
    saved = read_meta(newest)["meta"]["iter"]
    lost = f", of iteration {saved}" if saved < runner.iter else ""
    is_default = pathlib.Path(newest).parent == pathlib.Path(runner.work_dir)
    command = runner.resume_command(None if is_default else str(newest))
    return f"{at}; saved: {os.path.basename(newest)}{lost}. To continue: {command}"


def list_files(runner: RunnerInternals) -> str:
    """Return the paths of checkpoints, logs and TensorBoard files, one per line."""
    last = pathlib.Path(runner.work_dir, "last_checkpoint")
    newest = f" (last: {os.path.basename(last.read_text().strip())})" if last.exists() else ""
    vis_dir = os.path.join(runner.log_dir, "vis_data")
    lines = [
        f"checkpoints:  {runner.work_dir}{newest}",
        f"log:          {os.path.join(runner.log_dir, runner.timestamp + '.log')}",
        f"scalars:      {os.path.join(vis_dir, 'scalars.json')}",
    ]
    if os.path.isdir(vis_dir) and any("tfevents" in name for name in os.listdir(vis_dir)):
        lines.append(f"TensorBoard:  tensorboard --logdir {vis_dir}")
    return "\n".join(lines)


# --- Validations ---


def format_validations(
    validations: Sequence[Validation], *, by_epoch: bool, monitored: Iterable[tuple[str, str]] = ()
) -> str:
    """Return a table with a row for each validation and the metrics that are best in it.

    A long table is cut in the middle, except for the best rows. The last one among equal values is the best.

    >>> print(format_validations([(1, 10, {"acc": 0.5}), (2, 20, {"acc": 0.75})], by_epoch=True))
    Validations
    +-------+------+--------+------+
    | epoch | iter | acc    | best |
    +-------+------+--------+------+
    | 1     | 10   | 0.5000 |      |
    | 2     | 20   | 0.7500 | acc  |
    +-------+------+--------+------+

    Args:
      validations: epoch, iteration and metrics for each.
      by_epoch: whether to show the epochs as well as the iterations.
      monitored: the metrics to compare, each with 'greater' or 'less' for the better value. Without any, the first
        metric is compared whose name tells the rule.
    """
    names = list(dict.fromkeys(name for _, _, metrics in validations for name in metrics))
    rules = {name: rule for name, rule in monitored if name in names} or _infer_first(names)
    best: dict[int, list[str]] = {}
    for name, rule in rules.items():
        sign = 1 if rule == "greater" else -1
        values = [metrics.get(name) for _, _, metrics in validations]
        scores = [(sign * x, i) for i, x in enumerate(values) if isinstance(x, int | float) and not math.isnan(x)]
        if scores:
            best.setdefault(max(scores)[1], []).append(name)
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


def _cut_middle(rows: Sequence[list[str]], kept: Iterable[int]) -> list[list[str]]:
    """Return the first and last rows and those in `kept`, with the number of rows left out at each gap."""
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


# --- Time and speed ---


def wait_for_device(runner: RunnerInternals) -> None:
    """Wait until all dispatched steps are finished; the time counts as 'step', whatever the caller waits for."""
    with runner.phase_timer.phase("step"):
        runner.dispatch_limiter.drain()


def measure_speed(runner: RunnerInternals) -> dict[str, float]:
    """Return the time by phase and the speed, as scalars.

    Returns:
      'seconds/<phase>' for each phase, which add up to the time since training began; and, over the training time
      only, 'speed/iterations_per_second', and as far as they are known 'speed/examples_per_second',
      'speed/flops_per_second' over all devices and 'speed/model_flops_utilisation'.
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
    devices: set[Any] = runner.state.step.sharding.device_set
    kind = next(iter(devices)).device_kind
    if (share := compute_utilisation(flops, 1.0 / speed, kind, len(devices))) is not None:
        scalars["speed/model_flops_utilisation"] = share
    return scalars


def format_speed(scalars: Mapping[str, float]) -> str:
    """Return a table with the time by phase, followed by a line with the speed, from `measure_speed`."""
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


# --- Compilation cache ---


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


def _count_event(event: str, **_: object) -> None:
    if event in _CACHE_EVENTS:
        _cache_counts[_CACHE_EVENTS[event]] += 1


def cache_counts() -> tuple[int, int]:
    """Return the numbers of cache hits and misses in this process."""
    return _cache_counts["hits"], _cache_counts["misses"]
