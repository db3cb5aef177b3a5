"""Report the time of a run by phase, and its speed."""

from collections.abc import Callable, Mapping
from typing import Any

from jengine.logging import format_table
from jengine.runner.compilation_cache import cache_counts
from jengine.runner.peak_flops import compute_utilisation
from jengine.runner.runner_protocol import Runner

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
