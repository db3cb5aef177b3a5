import io
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.extras.imix import (
    CommonMetricLoggerHook,
    HookBase,
    IterationTimerHook,
    JSONLoggerHook,
    LogBufferWriter,
    PeriodicLogger,
    TensorboardLoggerHook,
)
from jengine.extras.imix.levels import PriorityStatus
from jengine.extras.imix.log_buffer import LogBuffer, to_uint8
from jengine.extras.imix.writers import median
from jengine.logging import HistoryBuffer
from jengine.logging.convert import histogram


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


class Clock:
    """Advance by `step` seconds at every call."""

    def __init__(self, step=1.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


class RecordingWriter(LogBufferWriter):
    def __init__(self):
        self.written, self.closed = [], 0

    def write(self, trainer):
        self.written.append(trainer.iter)

    def close(self):
        self.closed += 1


def run_training(hook, trainer, iterations, epochs=1):
    """Call the stages of an iMIX hook and advance the counters of the trainer as in a training."""
    trainer.train_loop.epoch_length = iterations
    trainer.max_iters, trainer.max_epochs = iterations * epochs, epochs
    hook.before_train(trainer)
    for trainer.epoch in range(epochs):
        trainer.train_loop.epoch_start = trainer.epoch * iterations
        hook.before_train_epoch(trainer)
        for inner in range(iterations):
            hook.before_train_iter(trainer, batch_idx=inner)
            hook.after_train_iter(trainer, batch_idx=inner, outputs={})
            trainer.iter += 1
        hook.after_train_epoch(trainer)
    trainer.epoch += 1
    hook.after_train(trainer)


def test_the_summary_excludes_the_warm_up_and_its_time(trainer):
    run_training(IterationTimerHook(warmup_iter=2, clock=Clock()), trainer, 10)
    # each iteration calls the clock twice: eight iterations take 16 s
    assert "The Whole training speed:8 iterations in 0:00:16 (2.0000 sec/iter)" in trainer.logs
    assert trainer.logs[-1].startswith("total training time:0:00:")


def test_iterations_and_epochs_are_timed(trainer):
    run_training(IterationTimerHook(clock=Clock()), trainer, 3, epochs=2)
    scalars = trainer.message_hub.log_scalars
    assert scalars["train/iter_time"].data[0].tolist() == [1.0] * 6
    assert (
        scalars["train/epoch_time"].data[0].tolist() == [7.0] * 2
    )  # six calls of the clock in the iterations, one at the end
    assert "epoch 1 time:0:00:07" in trainer.logs


def test_a_warm_up_as_long_as_the_run_has_no_summary(trainer):
    run_training(IterationTimerHook(warmup_iter=5, clock=Clock()), trainer, 3)
    assert not any("training speed" in line for line in trainer.logs)


def test_the_period_restarts_in_each_epoch(trainer):
    writer = RecordingWriter()
    run_training(PeriodicLogger([writer], log_config_period=4), trainer, 10, epochs=2)
    assert writer.written == [3, 7, 13, 17]  # after 4 and 8 iterations of each epoch
    assert writer.closed == 1


def test_training_by_iterations_also_writes_the_last_iteration(trainer):
    trainer.train_loop.by_epoch = False
    writer = RecordingWriter()
    run_training(PeriodicLogger([writer], log_config_period=4), trainer, 10)
    assert [iteration + 1 for iteration in writer.written] == [4, 8, 10]


def test_only_the_first_process_writes(trainer, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    writer = RecordingWriter()
    run_training(PeriodicLogger([writer], log_config_period=1), trainer, 3)
    assert writer.written == []


def add_scalars(trainer, **scalars):
    for name, values in scalars.items():
        for value in values:
            trainer.message_hub.update_scalar(f"train/{name}", value)


def test_the_line_in_the_terminal(trainer):
    add_scalars(
        trainer, iter_time=[0.5, 0.5, 2.0], data_time=[0.25], loss=[3.0, 1.5], loss_ce=[1.25], lr=[1e-4], acc=[0.5]
    )
    trainer.iter, trainer.epoch, trainer.max_epochs = 10, 1, 100
    trainer.train_loop.epoch_start = 10
    CommonMetricLoggerHook(max_iter=1000).write(trainer)
    (line,) = trainer.logs
    # the median of the times is 0.5 s, and 990 iterations remain
    assert line == " \t ".join([
        "epoch:1", "1/10", "current_iter:11", "max_iter:1000", "max_epoch:100", "total_loss: 1.500  loss_ce: 1.250",
        "lr:1.000000e-04", "load_data_time:0.2500", "iter_time:1.0000", "eta:0:08:15",
    ])  # fmt: skip


def test_the_peak_memory_is_logged_if_the_device_reports_it(trainer, monkeypatch):
    monkeypatch.setattr("jengine.extras.imix.writers._get_peak_memory", lambda: 3 * 2**20)
    trainer.train_loop.by_epoch = False
    CommonMetricLoggerHook().write(trainer)
    assert "max used memory:3M" in trainer.logs[0]
    assert trainer.logs[0].startswith("current_iter:1 \t max_iter:10")


def test_without_a_timer_the_remaining_time_is_estimated_from_the_second_line(trainer):
    writer = CommonMetricLoggerHook(max_iter=100, clock=Clock(20.0))
    for trainer.iter in (0, 10):
        writer.write(trainer)
    assert "eta" not in trainer.logs[0]
    assert trainer.logs[1].endswith("eta:0:03:00")  # 2 s for each of 90 iterations


def test_a_median_is_over_the_numbers_of_its_window():
    history = HistoryBuffer()
    history.extend([9.0, 1.0, math.nan, 2.0, 3.0, math.inf])
    assert median(history, 5) == 2.0
    history.update(math.nan)
    assert math.isnan(median(history, 1))


def test_json_lines_are_sorted_and_have_medians_but_the_latest_rate(trainer, tmp_path):
    add_scalars(trainer, loss=[1.0, 2.0, 30.0], lr=[0.3, 0.2, 0.1], grad_norm=[float("nan")])
    trainer.iter = 2
    writer = JSONLoggerHook(window_size=20)
    logger = PeriodicLogger([writer], 3)
    trainer.iter = 0
    logger.before_train(trainer)
    trainer.iter = 2
    logger.after_train_iter(trainer, batch_idx=2, outputs={})
    (line,) = (tmp_path / "training_status.json").read_text().splitlines()
    assert json.loads(line) == {
        "epoch": 0, "grad_norm": "nan", "inner-iteration": 2, "iteration": 2, "lr": 0.1, "total_loss": 2.0,
    }  # fmt: skip
    assert re.findall(r'"([\w-]+)":', line) == sorted(json.loads(line))


def test_a_resumed_run_continues_the_file_and_a_new_run_overwrites_it(trainer, tmp_path):
    path = tmp_path / "status.json"
    path.write_text('{"iteration": 1}\n{"iteration": 3}\n{"iterat')
    writer = JSONLoggerHook(json_file=path)
    trainer.iter = 2
    writer.begin(trainer)
    writer.write(trainer)
    writer.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]
    trainer.iter = 0
    writer.begin(trainer)
    assert len(path.read_text().splitlines()) == 2, "a run that is refused keeps the file"
    writer.write(trainer)
    writer.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [0]
    with pytest.raises(RuntimeError, match="`begin` must be called before `write`"):
        writer.write(trainer)


def test_tensorboard_has_a_value_per_period_and_per_epoch(trainer, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    add_scalars(trainer, loss=[1.0, 2.0, 30.0], lr=[0.3, 0.2, 0.1])
    run_training(PeriodicLogger([TensorboardLoggerHook()], log_config_period=4), trainer, 6)
    (path,) = (tmp_path / "runs").iterdir()
    values = [
        (event.step, value.tag, round(value.tensor.float_val[0], 6))
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert values == [(3, "total_loss", 2.0), (3, "lr", 0.1), (6, "total_loss", 2.0), (6, "lr", 0.1)]


def test_tensorboard_discards_the_iterations_that_a_resumed_run_repeats(trainer, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    add_scalars(trainer, loss=[1.0])
    for start, end in ((0, 4), (2, 5)):  # killed after four iterations, resumed from a checkpoint after two
        writer = TensorboardLoggerHook()
        trainer.iter = start
        writer.begin(trainer)
        for trainer.iter in range(start, end):
            writer.write(trainer)
        writer.close()
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    assert [event.step for event in events.Scalars("total_loss")] == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="`begin` must be called before `write`"):
        TensorboardLoggerHook().write(trainer)


class Pictures(HookBase):
    """Write an image and a histogram in each iteration."""

    default_level = PriorityStatus.HIGHER

    def after_train_iter(self):
        level = self.trainer.iter / 4
        self.put_image("grey", jnp.full((2, 3, 1), level))
        self.put_histogram("values", jnp.array([0.0, level, 1.0, jnp.nan]))


def test_images_and_histograms_are_written_to_tensorboard_with_each_line(imix_runner, run_dir):
    image = pytest.importorskip("PIL.Image")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class RecordSizes(HookBase):
        default_level = PriorityStatus.LOWEST

        def __init__(self):
            self.seen = []

        def after_train_iter(self):
            (buffer,) = self.log_buffers()
            self.seen.append((len(buffer.images), len(buffer.histograms)))

    sizes = RecordSizes()
    writers = [dict(type="TensorboardLoggerHook"), dict(type="JSONLoggerHook")]
    runner = imix_runner(8, log_config=dict(period=2, hooks=writers), custom_hooks=[Pictures(), sizes])
    runner.train()
    assert sizes.seen == [(1, 1), (0, 0), (1, 1), (0, 0)]
    events = EventAccumulator(str(run_dir / "runs"), size_guidance=dict(images=0, histograms=0)).Reload()
    images = events.Images("grey")
    assert [event.step for event in images] == [0, 1, 2, 3]
    pixels = [np.asarray(image.open(io.BytesIO(event.encoded_image_string))) for event in images]
    assert [(p.shape, set(p.ravel().tolist())) for p in pixels] == [((2, 3), {level}) for level in (0, 64, 128, 191)]
    bins = [event.histogram_value for event in events.Histograms("values")]
    assert [(h.min, h.max, h.num, h.sum) for h in bins] == [
        (0.0, 1.0, 3.0, pytest.approx(1 + level / 4, abs=1e-6)) for level in range(4)
    ]
    assert len(bins[0].bucket_limit) <= 800
    assert runner.programs.update.traces == 1


def test_all_validation_results_are_written_to_tensorboard(imix_runner, run_dir, test_data):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writers = [dict(type="TensorboardLoggerHook")]
    runner = imix_runner(
        8, total_epochs=2, eval_iter_period=2, log_config=dict(period=3, hooks=writers), test_data=test_data
    )
    runner.train()
    events = EventAccumulator(str(run_dir / "runs")).Reload().Scalars("val/loss")
    lines = [json.loads(line) for line in (run_dir / "eval_result.json").read_text().splitlines()]
    assert [event.step for event in events] == [line["iter"] for line in lines] == [1, 3, 5, 7]
    assert [event.value for event in events] == pytest.approx([line["loss"] for line in lines])


def test_images_are_dropped_without_a_writer_for_them(imix_runner):
    runner = imix_runner(4, log_config=dict(period=100), custom_hooks=[Pictures()])
    runner.train()
    (logger,) = (hook for hook in runner.hooks if isinstance(hook, PeriodicLogger))
    assert (logger.log_buffer.images, logger.log_buffer.histograms) == ([], [])


@pytest.mark.parametrize("values", [[2.0, 2.0], [np.nan, np.inf], [-1.0, 0.5, 3.0]])
def test_device_histograms_equal_host_histograms(values):
    buffer = LogBuffer(keep=True)
    buffer.put_histogram("h", jnp.array(values), step=1)
    (bins,) = buffer.histograms
    expected = histogram(np.array(values), bins=800)
    np.testing.assert_array_equal(np.asarray(bins.counts), expected.counts)
    np.testing.assert_allclose(bins.edges, expected.edges, atol=1e-6)
    np.testing.assert_allclose([bins.mean, bins.std], [expected.mean, expected.std], atol=1e-6)


def test_images_are_converted_to_uint8():
    integers = np.array([[[0, 200, 255]]], np.uint8)
    assert to_uint8(integers) is integers
    assert to_uint8(np.array([[[-1.0, 0.5, 2.0]]])).tolist() == [[[0, 128, 255]]]
