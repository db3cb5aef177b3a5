import dataclasses
import itertools
import json
import re

import jax
import pytest

from jengine.config import plugins
from jengine.extras.plan import peak_flops
from jengine.extras.plan.flops import step_flops
from jengine.extras.report.goodput import format_time, measure_goodput
from jengine.hooks import Hook
from jengine.logging import Stopwatch
from jengine.parallel import DispatchLimiter
from jengine.runner.report import measure_speed

# forward a product of (4, 2) and (2,), backward one of (2, 4) and (4,): 8 multiplications and 8 additions each
FLOPS = 32


def read_log(runner):
    with open(f"{runner.log_dir}/{runner.timestamp}.log") as file:
        return file.read()


def read_last_scalars(runner):
    with open(f"{runner.log_dir}/vis_data/scalars.json") as file:
        return json.loads(file.readlines()[-1])


def train_with_fake_clock(make_runner, **changes):
    runner = make_runner(default_hooks={}, validates=True, **changes)
    ticks = itertools.count()
    clock = Stopwatch(lambda: float(next(ticks)))
    runner.run = dataclasses.replace(runner.run, stopwatch=clock)  # one second for each reading of the clock
    runner.train()
    return runner, next(ticks)


def test_every_second_of_a_run_belongs_to_a_phase_that_is_logged(make_runner):
    runner, ticks = train_with_fake_clock(make_runner)
    logged = read_last_scalars(runner)
    seconds = {
        name.removeprefix("seconds/"): duration for name, duration in logged.items() if name.startswith("seconds/")
    }
    assert set(seconds) == {"setup", "compile", "input", "hooks", "step", "validation", "checkpoint", "logging"}
    # one reading at construction, one when training starts, one for this number, two of the record at the end
    assert ticks - 5 - sum(seconds.values()) <= 2  # and the readings of closing
    assert logged["step"] == 8
    table = read_log(runner).split("Time\n")[1]
    assert re.search(r"\ncompilation cache: \d+ programs found, \d+ compiled\n", table)
    for phase, duration in seconds.items():
        assert re.search(rf"\| {phase} +\| {duration:.2f} ", table)
        assert runner.message_hub.get_scalar(f"seconds/{phase}").current() == duration


class SlowDevice(DispatchLimiter):
    """Advance a clock by a second for each step that is waited for."""

    def __init__(self):
        super().__init__(limit=2)
        self.now = 0.0

    def wait(self):
        if len(self.tokens) == self.limit:
            self.now += 1.0
            self.tokens.popleft()

    def drain(self):
        self.now += len(self.tokens)
        self.tokens.clear()


def test_waiting_for_the_device_is_time_of_the_step(make_runner):
    class Watch(Hook):
        """Collect the steps that validations and saves would wait for."""

        def before_train(self, runner):
            self.unfinished = []

        def before_val(self, runner):
            self.unfinished.append(len(device.tokens))

        def after_val(self, runner):
            device.tokens.clear()  # the metrics were read

        def before_save_checkpoint(self, runner, checkpoint):
            self.unfinished.append(len(device.tokens))

    watch, device = Watch(), SlowDevice()
    runner = make_runner(default_hooks={}, custom_hooks=[watch], validates=True)
    runner.run = dataclasses.replace(runner.run, stopwatch=Stopwatch(lambda: device.now), limiter=device)
    runner.train()
    logged = read_last_scalars(runner)
    assert {name: value for name, value in logged.items() if name.startswith("seconds/") and value} == {
        "seconds/step": 8
    }
    assert watch.unfinished == [0, 0] * 2  # a save and a validation in each epoch


def test_speed_is_measured_over_the_time_of_training_only(make_runner):
    runner, _ = train_with_fake_clock(make_runner)
    logged = read_last_scalars(runner)
    training = sum(logged[f"seconds/{phase}"] for phase in ("input", "hooks", "step", "logging"))
    assert logged["speed/iterations_per_second"] == pytest.approx(8 / training)
    assert logged["speed/examples_per_second"] == pytest.approx(8 * 4 / training)
    assert logged["speed/flops_per_second"] == pytest.approx(8 * FLOPS / training)
    assert runner.programs.update.traces == 1  # counting them does not trace the step
    text = f"{8 / training:,.1f} iterations/s, {32 / training:,.0f} examples/s, {8 * FLOPS / training:,.0f} FLOP/s, without"
    assert text in read_log(runner)


def test_utilisation_is_reported_for_devices_with_a_known_peak(make_runner, monkeypatch):
    runner, _ = train_with_fake_clock(make_runner)
    assert "speed/model_flops_utilisation" not in read_last_scalars(runner)  # unknown for a CPU
    assert "peak" not in read_log(runner)
    kinds = []

    def compute_utilisation(flops, seconds, device_kind, devices):
        kinds.append((device_kind, devices))
        return FLOPS / seconds / 1000 if flops == {"float32": FLOPS} else None

    monkeypatch.setattr(peak_flops, "compute_utilisation", compute_utilisation)
    scalars, lines = measure_speed(runner, runner.iter)
    assert kinds == [("cpu", 1)]
    share = scalars["speed/model_flops_utilisation"]
    assert share == pytest.approx(scalars["speed/flops_per_second"] / 1000)
    assert f"{share:.1%} of the devices' peak, without compiling" in lines[-1]


@pytest.mark.parametrize(
    "parallel", [dict(type="Pjit", devices=4), dict(type="DataParallel", devices=4)], ids=["pjit", "replica"]
)
def test_operations_are_counted_over_all_devices(make_runner, parallel):
    runner = make_runner(parallel=parallel, train_cfg=dict(max_epochs=1))
    runner.train()
    assert step_flops(runner.programs) == {"float32": FLOPS}
    assert runner.programs.update.traces == 1


def test_each_iteration_of_a_chunk_counts(make_runner):
    runner, _ = train_with_fake_clock(make_runner, train_cfg=dict(max_epochs=2, steps_per_call=4))
    assert step_flops(runner.programs) == {"float32": FLOPS}
    assert runner.programs.chunk.traces == 1
    logged = read_last_scalars(runner)
    training = sum(logged[f"seconds/{phase}"] for phase in ("input", "hooks", "step", "logging"))
    assert logged["speed/iterations_per_second"] == pytest.approx(8 / training)
    assert logged["seconds/compile"] >= 1


def test_large_rates_have_a_prefix():
    assert peak_flops.format_flops(1.25e12) == "1.2 TFLOP/s"


def test_without_extras_the_report_has_the_speed_alone(make_runner, monkeypatch):
    runner, _ = train_with_fake_clock(make_runner)
    monkeypatch.setattr(plugins, "provided", lambda section: {})
    scalars, (line,) = measure_speed(runner, runner.iter)
    assert re.fullmatch(r"\S+ iterations/s, \S+ examples/s, without compiling, validation and checkpoints", line)
    speeds = {name for name in scalars if name.startswith("speed/")}
    assert speeds == {"speed/iterations_per_second", "speed/examples_per_second"}


def test_the_table_has_the_share_of_each_part():
    assert "| step | 1.00    | 100.0% |" in format_time({"step": 1.0}, measure_goodput([]))[0]


def test_a_resumed_run_without_remaining_iterations_reports_only_its_time(make_runner):
    make_runner(default_hooks={}).train()
    runner = make_runner(default_hooks={}, resume=True)
    runner.train()
    assert not any(name.startswith("speed/") for name in read_last_scalars(runner))
    assert jax.device_get(runner.state.step) == 8
