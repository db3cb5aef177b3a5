"""Report the time of a run by phase, and its speed."""

from collections.abc import Callable, Mapping
from typing import Any

from jengine.logging import format_table
from jengine.runner.compilation_cache import cache_counts
from jengine.runner.peak_flops import utilisation
from jengine.runner.runner_protocol import Runner

_TRAINING = ("input", "hooks", "step", "logging")  # without compiling, validation, checkpoints and setup


def speed_of(runner: Runner) -> dict[str, float]:
    """Return the time account of a run up to now, as scalars.

    Args:
      runner: after training.

    Returns:
      'seconds/<part>' for each part, which add up to the time since training began; and, over the time of training
      alone, 'speed/iterations_per_second', 'speed/examples_per_second' where the size of a batch is known,
      'speed/flops_per_second' over all devices where the step has products to count, and
      'speed/model_flops_utilisation' where the peak of the devices is known.
    """
    seconds = runner.phase_timer.report()
    scalars = {f"seconds/{part}": took for part, took in seconds.items()}
    training = sum(seconds.get(part, 0.0) for part in _TRAINING)
    if runner.iters_this_session == 0 or training == 0.0:
        return scalars
    speed = runner.iters_this_session / training
    scalars["speed/iterations_per_second"] = speed
    if batch_size := getattr(runner.train_dataloader, "batch_size", None):
        scalars["speed/examples_per_second"] = speed * batch_size * runner.processes.count
    flops = runner.programs.flops()
    if flops:
        scalars["speed/flops_per_second"] = speed * sum(flops.values())
    assert runner.state is not None
    devices: set[Any] = runner.state.step.sharding.device_set
    kind = next(iter(devices)).device_kind
    if (share := utilisation(flops, 1.0 / speed, kind, len(devices))) is not None:
        scalars["speed/model_flops_utilisation"] = share
    return scalars


def speed_table(scalars: Mapping[str, float]) -> str:
    """Return the time account as a table, with the speed in a line below.

    Args:
      scalars: as returned by `speed_of`.
    """
    seconds = {name.removeprefix("seconds/"): took for name, took in scalars.items() if name.startswith("seconds/")}
    total = sum(seconds.values())
    rows = [[part, f"{took:.2f}", f"{took / total:.1%}"] for part, took in seconds.items()]
    table = format_table(["part", "seconds", "share"], [*rows, ["all", f"{total:.2f}", "100.0%"]], title="Time")
    hits, misses = cache_counts()
    lines = [table, f"compilation cache: {hits} programs found, {misses} compiled"]
    forms: dict[str, Callable[[float], str]] = {
        "iterations_per_second": "{:,.1f} iterations/s".format,
        "examples_per_second": "{:,.0f} examples/s".format,
        "flops_per_second": _flops,
        "model_flops_utilisation": "{:.1%} of the devices' peak".format,
    }
    told = [form(scalars[f"speed/{name}"]) for name, form in forms.items() if f"speed/{name}" in scalars]
    if told:
        lines.append(f"{', '.join(told)}, without compiling, validation and checkpoints")
    return "\n".join(lines)


def _flops(value: float) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:,.1f} {prefix}FLOP/s"
    return f"{value:,.0f} FLOP/s"
