import dataclasses
import functools
import json
import logging
import pathlib
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.hooks import Hook, LoggerHook
from jengine.logging import AsyncWriter, MessageHub, Stopwatch, pending_scalars
from jengine.model import FunctionalModel
from jengine.parallel.strategy import DispatchLimiter
from jengine.train import RecompilationError


@pytest.fixture
def make_runner(make_runner):
    """Make runs that validate: their lines are looked at."""
    return functools.partial(make_runner, validates=True)


class Spy(Hook):
    """Copy the contents of the message hub at the end of each stage."""

    priority = "LOWEST"

    def __init__(self):
        self.stages = []
        self.first = None

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.first is None:
            self.first = dict(runner.message_hub.runtime_info), set(runner.message_hub.log_scalars)

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.stages.append(runner.message_hub.get_info("loop_stage"))

    def before_train_epoch(self, runner):
        self.stages.append(runner.message_hub.get_info("loop_stage"))

    def after_train_epoch(self, runner):
        self.stages.append(runner.message_hub.get_info("loop_stage"))


def scalar_lines(runner):
    path = pathlib.Path(runner.log_dir) / "vis_data" / "scalars.json"
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_text(runner):
    return (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()


def messages(runner, start):
    texts = [line.split(" - INFO - ", 1)[-1] for line in log_text(runner).splitlines()]
    return [text for text in texts if text.startswith(start)]


def test_the_hub_describes_the_run(make_runner):
    spy = Spy()
    runner = make_runner(custom_hooks=[spy])
    runner.train()
    infos, scalars = spy.first
    assert infos["iter"] == infos["epoch"] == 0
    assert (infos["max_epochs"], infos["max_iters"], infos["seed"]) == (2, 8, 0)
    assert {"train/lr", "train/loss", "train/time", "train/data_time"} <= scalars
    assert spy.stages == ["train", "train", "val", "val", "train", "train", "val", "val"]
    assert runner.message_hub.get_info("loop_stage") is None
    assert runner.message_hub.get_scalar("val/loss").current() == runner.validations[-1][2]["loss"]


def test_val_alone_removes_its_stage_from_the_hub(make_runner):
    runner = make_runner()
    runner.val()
    assert runner.message_hub.get_info("loop_stage") is None


@pytest.mark.parametrize(
    ("length", "interval", "ignore_last", "expected"),
    [
        (45, 20, True, [20, 40]),
        (45, 20, False, [20, 40, 45]),
        (15, 20, True, [15]),
        (4, 3, True, [3]),
        (4, 3, False, [3, 4]),
    ],
)
def test_the_iterations_that_are_logged(fake_logging_runner, length, interval, ignore_last, expected):
    hook = LoggerHook(interval=interval, ignore_last=ignore_last)
    runner = fake_logging_runner(length)
    log_iterations(hook, runner, length)
    runner.log_writer.close()
    assert [step for step, _ in runner.scalars] == expected


def log_iterations(hook, runner, count):
    hook.before_train_epoch(runner)
    for i in range(count):
        runner.iter = runner.train_loop.iter = i
        hook.after_train_iter(runner, batch_idx=i, outputs={})


@pytest.fixture
def fake_logging_runner():
    import types

    def make(length):
        runner = types.SimpleNamespace(
            iter=0, epoch=0, max_iters=length, max_epochs=1, scalars=[], timestamp="t", experiment_name="e",
            train_loop=types.SimpleNamespace(
                epoch_length=length, by_epoch=True, check=lambda: None, remaining_seconds=None
            ),
            logger=logging.Logger("fake", logging.INFO), stopwatch=Stopwatch(), log_writer=AsyncWriter(),
            message_hub=MessageHub("fake"),
            log_processor=types.SimpleNamespace(get_log_after_iter=lambda *args: ({}, "")),
        )  # fmt: skip
        runner.visualizer = types.SimpleNamespace(
            add_scalars=lambda tag, step, file_path: runner.scalars.append((step, file_path))
        )
        return runner

    return make


def test_lines_before_a_failing_one_are_written(fake_logging_runner):
    runner, texts = fake_logging_runner(20), []

    def get_log(then, batch_idx, mode):
        if batch_idx == 14:
            raise ValueError("no such statistic")
        return {"iter": then.iter + 1}, f"line of {then.iter + 1}"

    runner.log_processor.get_log_after_iter = get_log
    runner.logger.addFilter(lambda record: texts.append(record.getMessage()) or True)
    log_iterations(LoggerHook(interval=5), runner, 15)
    with pytest.raises(ValueError, match="no such statistic"):
        runner.log_writer.flush()
    assert texts == ["line of 5", "line of 10"]
    assert [step for step, _ in runner.scalars] == [5, 10]


def test_the_lines_of_a_run(make_runner):
    runner = make_runner(default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=2)))
    runner.train()
    number = r"\d+\.\d{4}"
    train = rf"Epoch\(train\) \[1\]\[2/4\]  lr: 1\.0000e-01  eta: 0:00:0\d  time: {number}  data_time: {number}  loss: {number}$"
    lines = messages(runner, "Epoch(train)")
    assert re.match(train, lines[0]), lines[0]
    assert [re.findall(r"\[(\d)\]\[(\d)/4\]", line)[0] for line in lines] == [
        ("1", "2"),
        ("1", "4"),
        ("2", "2"),
        ("2", "4"),
    ]
    val = messages(runner, "Epoch(val) [1][2/2]    loss:")
    assert re.match(rf"Epoch\(val\) \[1\]\[2/2\]    loss: {number}  data_time: {number}  time: {number}$", val[0])


def test_the_lines_of_an_iteration_loop(make_runner):
    runner = make_runner(
        train_cfg=dict(by_epoch=False, max_iters=10, val_interval=5),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=4)),
    )
    runner.train()
    assert [line[:21] for line in messages(runner, "Iter(train)")] == ["Iter(train) [ 4/10]  ", "Iter(train) [ 8/10]  "]
    assert messages(runner, "Iter(val)")


def test_the_scalars_of_a_run(make_runner):
    runner = make_runner(default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=2)))
    runner.train()
    lines = scalar_lines(runner)
    train, val = lines[0], lines[2]
    assert set(train) == {"lr", "data_time", "loss", "time", "epoch", "iter", "mode", "step"}
    assert (train["mode"], train["epoch"], train["iter"], train["step"], train["lr"]) == ("train", 1, 2, 2, 0.1)
    assert set(val) == {"loss", "data_time", "time", "epoch", "iter", "mode", "step"}
    assert (val["mode"], val["epoch"], val["iter"], val["step"]) == ("val", 1, 4, 4)
    assert val["loss"] == runner.validations[0][2]["loss"]
    copy = pathlib.Path(runner.log_dir) / "vis_data" / f"{runner.timestamp}.json"
    assert copy.read_text() == (pathlib.Path(runner.log_dir) / "vis_data" / "scalars.json").read_text()


def test_a_line_has_the_mean_loss_and_the_current_learning_rate(make_runner):
    class Prescribed(Hook):
        """Set losses 1 to 10, and a learning rate that changes at each iteration."""

        priority = "HIGHEST"

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            runner.optim_wrapper.param_groups[0]["lr"] = 0.001 * (runner.iter + 1)

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            outputs["loss"] = np.float32(runner.iter + 1)

    runner = make_runner(
        train_cfg=dict(by_epoch=False, max_iters=10, val_begin=99),
        custom_hooks=[Prescribed()],
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=10)),
    )
    runner.train()
    line, _ = scalar_lines(runner)
    assert line["loss"] == 5.5
    assert line["lr"] == pytest.approx(0.010)


def test_the_step_is_traced_once_over_logging_validation_and_schedules(make_runner):
    runner = make_runner(
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), clip_grad=dict(max_norm=1.0)),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=4),
            dict(type="CosineAnnealingLR", by_epoch=True, begin=1, end=2),
        ],
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=2)),
    )
    traces = []
    original = runner.model.loss
    runner.model.loss = lambda *args, **kwargs: traces.append(1) or original(*args, **kwargs)
    runner.train()
    assert len(traces) == 1
    assert runner.programs.update.traces == 1
    assert runner.programs.accumulate.traces == 0


@pytest.mark.parametrize("steps_per_call", [1, 50])
def test_a_hundred_iterations_with_ten_lines_transfer_at_most_ten_times_and_never_in_the_loop(
    make_runner, monkeypatch, steps_per_call
):
    transfers, reads, main = [], [], threading.current_thread()
    array_type, fetch = type(jax.numpy.zeros(())), pending_scalars.fetch_arrays
    value = array_type._value

    def read(array):
        reads.append(threading.current_thread())
        return value.fget(array)

    monkeypatch.setattr(array_type, "_value", property(read))
    fetched = []  # kept, so that no other array gets the id of one

    def fetch_new(arrays):
        if not {id(x) for x in arrays} <= {id(x) for x in fetched}:  # JAX keeps the copies of the others
            transfers.append(threading.current_thread())
        fetched.extend(arrays)
        return fetch(arrays)

    monkeypatch.setattr(pending_scalars, "fetch_arrays", fetch_new)
    runner = make_runner(
        train_cfg=dict(by_epoch=False, max_iters=100, val_begin=999, steps_per_call=steps_per_call),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=10)),
    )

    class Count(Hook):
        priority = "HIGHEST"

        def before_train(self, runner):
            transfers.clear()
            reads.clear()

        def after_train(self, runner):
            runner.log_writer.flush()
            self.transfers, self.reads = list(transfers), list(reads)

    count = Count()
    runner.register_hook(count)
    runner.train()
    assert len(count.transfers) == (10 if steps_per_call == 1 else 2)
    assert len(messages(runner, "Iter(train)")) == 10
    assert main not in count.transfers
    assert main not in count.reads  # nothing else reads an array
    assert runner.message_hub.get_scalar("train/loss").updates == 100


class Clock:
    """Return a time that only tests advance."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_time_of_an_iteration_includes_its_data_and_with_blocking_the_device(make_runner):
    clock, batch = Clock(), {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}

    class SlowData(list):
        def __iter__(self):
            for item in list.__iter__(self):
                clock.now += 0.02
                yield item

    class Limiter(DispatchLimiter):
        def drain(self):
            clock.now += 0.05 * self.blocks

    def times(block):
        runner = make_runner(
            train_dataloader=SlowData([batch] * 6),
            train_cfg=dict(max_epochs=1, val_begin=9),
            default_hooks=dict(checkpoint=None, logger=None, timer=dict(type="IterTimerHook", block=block)),
        )
        runner.run = dataclasses.replace(runner.run, stopwatch=Stopwatch(clock), limiter=Limiter(4))
        runner.train()
        return (runner.message_hub.get_scalar(f"train/{name}").data[0] for name in ("data_time", "time"))

    data_time, time = times(block=False)
    assert sum(data_time) == pytest.approx(5 * 0.02)  # the first batch is read before training, as an example
    assert np.all(time >= data_time)
    data_time, time = times(block=True)
    assert np.all(time >= data_time + 0.05 - 1e-9)


def test_the_storage_of_out_dir_can_be_given_in_mmengines_terms():
    settings = dict(backend="petrel", path_mapping={"logs/": "s3://bucket/logs/"})
    assert LoggerHook(out_dir="logs/a", backend_args=settings).out_dir == "s3://bucket/logs/a"
    assert LoggerHook(out_dir="logs/a", file_client_args=dict(backend="disk")).out_dir == "logs/a"
    with pytest.raises(ValueError, match=r"out_dir` must be a path like 's3://...' with backend='petrel', got 'logs'"):
        LoggerHook(out_dir="logs", backend_args=dict(backend="petrel"))
    with pytest.raises(ValueError, match=r"`LoggerHook.out_dir` must be a local path or a URL of gs:// or s3://"):
        LoggerHook(out_dir="ftp://host/logs")


def test_logs_are_copied_to_out_dir(make_runner, tmp_path):
    runner = make_runner(
        train_cfg=dict(max_epochs=1),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=2, out_dir=str(tmp_path / "out"))),
    )
    runner.train()
    copied = {str(p.relative_to(tmp_path / "out" / "run")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert f"{runner.timestamp}.log" in copied
    assert "vis_data/scalars.json" in copied


def test_a_test_writes_its_metrics(make_runner):
    dataset = make_runner().val_dataloader.dataset
    runner = make_runner(
        default_hooks=None, test_dataloader=dict(batch_size=4, dataset=dataset), test_cfg=dict(),
        test_evaluator=dict(type="MeanLoss", loss=lambda p, b: (p - b["y"]) ** 2),
    )  # fmt: skip
    metrics = runner.test()
    written = json.loads((pathlib.Path(runner.log_dir) / f"{runner.timestamp}.json").read_text())
    assert written["loss"] == pytest.approx(metrics["loss"])


def test_a_metric_that_is_not_finite_is_written_as_a_string(make_runner):
    dataset = make_runner().val_dataloader.dataset
    runner = make_runner(
        default_hooks=None, test_dataloader=dict(batch_size=4, dataset=dataset), test_cfg=dict(),
        test_evaluator=dict(type="MeanLoss", loss=lambda p, b: p * float("nan")),
    )  # fmt: skip
    runner.test()
    written = json.loads((pathlib.Path(runner.log_dir) / f"{runner.timestamp}.json").read_text())
    assert written["loss"] == "NaN"


@pytest.mark.parametrize("steps_per_call", [1, 10])
def test_an_error_of_a_step_loses_no_line_before_it(make_runner, steps_per_call):
    batch = {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}
    other = {"x": np.ones((4, 2), np.float16), "y": np.ones(4, np.float32)}
    runner = make_runner(
        train_dataloader=[batch] * 56 + [other] * 4,
        train_cfg=dict(by_epoch=False, max_iters=60, on_recompile="raise", steps_per_call=steps_per_call),
        val_dataloader=None,
        val_cfg=None,
        val_evaluator=None,
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=5)),
    )
    with pytest.raises(RecompilationError) as error:
        runner.train()
    assert [line["iter"] for line in scalar_lines(runner)] == list(range(5, 60, 5))
    assert runner.message_hub.get_scalar("train/loss").updates == 56
    assert error.value.__notes__[-1] == "in training, at iteration 56 (epoch 0)"


@pytest.mark.parametrize("steps_per_call", [1, 8])
def test_the_data_time_of_a_chunk_is_that_of_all_batches(make_runner, steps_per_call):
    batch = {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}

    class SlowData(list):
        def __iter__(self):
            for item in list.__iter__(self):
                time.sleep(0.004)
                yield item

    runner = make_runner(
        train_dataloader=SlowData([batch] * 40),
        train_cfg=dict(by_epoch=False, max_iters=40, steps_per_call=steps_per_call),
        val_dataloader=None,
        val_cfg=None,
        val_evaluator=None,
    )
    runner.train()
    data_time = runner.message_hub.get_scalar("train/data_time").data[0]
    assert len(data_time) == 40
    assert data_time[16:].mean() >= 0.004
    iter_time = runner.message_hub.get_scalar("train/time").data[0]
    assert (data_time <= iter_time).all()


def test_an_error_of_a_hook_that_is_called_ahead_loses_no_line_of_an_earlier_chunk(make_runner):
    class Failing(Hook):
        acts_on = "hyperparams"

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == 27:
                raise RuntimeError("enough")

    runner = make_runner(
        train_cfg=dict(by_epoch=False, max_iters=60, val_begin=99, steps_per_call=10),
        custom_hooks=[Failing()],
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=5)),
    )
    with pytest.raises(RuntimeError, match="enough"):
        runner.train()
    assert [line["iter"] for line in scalar_lines(runner)] == [5, 10, 15, 20]
    assert int(runner.state.step) == 20


def order_of_losses(runner, last_line):
    """Return the names of the losses and of the gradient norm in the first or the last line of training."""
    line = messages(runner, "Epoch(train)")[-1 if last_line else 0]
    return re.findall(r"(\w*loss\w*|grad_norm|count): ", line)


@pytest.fixture
def make_runner_with_losses(make_runner):
    """Return a function that makes a Runner of a model with several losses, which logs each iteration."""

    def make(**changes):
        def loss(params, batch):
            value = jnp.square(params["w"].sum() - batch["y"])
            return {"z_loss": value, "a_loss": value, "count": jnp.ones(())}

        model = FunctionalModel(
            init=lambda: {"w": jnp.zeros((2,))}, loss=loss, predict=lambda params, batch: batch["y"]
        )
        arguments = dict(
            model=model,
            train_cfg=dict(max_epochs=2, steps_per_call=changes.pop("steps_per_call", 1)),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01), clip_grad=dict(max_norm=1.0)),
            default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
        )
        return make_runner(**{**arguments, **changes})

    return make


ORDER = ["loss", "z_loss", "a_loss", "count", "grad_norm"]


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("parallel", [None, dict(type="DataParallel", devices=2)], ids=["one", "replica"])
def test_the_loss_comes_first_and_then_the_losses_as_the_model_gives_them(
    make_runner_with_losses, steps_per_call, parallel
):
    runner = make_runner_with_losses(steps_per_call=steps_per_call, parallel=parallel)
    runner.train()
    assert order_of_losses(runner, last_line=True) == ORDER


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_the_order_of_losses_is_kept_by_accumulation_and_skipped_steps(make_runner_with_losses, steps_per_call):
    class Skip(Hook):
        """Skip the third step, and report a metric before the losses are computed."""

        def traced_batch(self, ctx):
            return ctx.replace(metrics={**ctx.metrics, "before": jnp.zeros(())})

        def traced_grads(self, ctx):
            return ctx.replace(apply_update=ctx.step != 2)

    wrapper = dict(optimizer=dict(type="SGD", lr=0.01), clip_grad=dict(max_norm=1.0), accumulative_counts=2)
    runner = make_runner_with_losses(optim_wrapper=wrapper, custom_hooks=[Skip()], steps_per_call=steps_per_call)
    runner.train()
    assert order_of_losses(runner, last_line=True) == ORDER


def test_a_resumed_run_keeps_the_order_of_losses(make_runner_with_losses):
    make_runner_with_losses(train_cfg=dict(max_epochs=1)).train()
    runner = make_runner_with_losses(resume=True)
    runner.train()
    assert order_of_losses(runner, last_line=True) == ORDER


def test_the_learning_rate_in_the_log_is_that_of_the_first_parameter_as_defined(make_runner):
    from flax import linen as nn

    from jengine.model import LinenModel

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(1, name="a_head")(nn.Dense(3, name="stem")(x))[:, 0]

    runner = make_runner(
        model=LinenModel(Net(), loss=lambda outputs, batch: jnp.square(outputs - batch["y"]), inputs="x"),
        train_cfg=dict(max_epochs=1, val_begin=9),
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=0.1), paramwise_cfg=dict(custom_keys={"stem": dict(lr_mult=0.5)})
        ),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=4)),
    )
    runner.train()
    line = scalar_lines(runner)[0]
    assert (line["lr"], line["base_lr"]) == (0.05, 0.1)


# --- Means over windows ---


class StopAt(Hook):
    """Stop training after an iteration."""

    def __init__(self, iteration):
        self.iteration = iteration

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        runner.train_loop.stop_training |= runner.iter + 1 == self.iteration


def make_means(*windows, sources=("loss",)):
    return dict(
        custom_cfg=[
            dict(data_src=source, log_name=f"{window}_{source}", method_name="mean", window_size=window)
            for source in sources
            for window in windows
        ]
    )


def count_up(length, **settings):
    """Return arguments for a run whose loss in the i-th iteration of an epoch is i."""
    data = ArrayDataset(dict(x=np.ones((length, 1), np.float32), y=np.arange(length, dtype=np.float32)))
    return dict(
        model=FunctionalModel(lambda: {"w": jnp.zeros(1)}, lambda p, b: b["y"] * (1 + b["x"] @ p["w"])),
        train_dataloader=dict(batch_size=1, dataset=data, sampler=dict(type="DefaultSampler", shuffle=False)),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0), clip_grad=dict(max_norm=1e9), **settings),
        val_dataloader=None, val_cfg=None, val_evaluator=None,
    )  # fmt: skip


def train_lines(runner):
    return {row["step"]: row for row in scalar_lines(runner) if row.get("mode") == "train"}


@pytest.mark.parametrize("steps_per_call", [1, 10])
def test_means_over_an_epoch_and_long_windows_continue_after_a_resume(make_runner, tmp_path, steps_per_call):
    arguments = dict(
        **count_up(300),
        work_dir=tmp_path,
        train_cfg=dict(max_epochs=2, steps_per_call=steps_per_call),
        log_processor=make_means("epoch", 280),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=60)),
    )
    make_runner(custom_hooks=[StopAt(570)], **arguments).train()
    runner = make_runner(resume=True, **arguments)
    runner.train()
    line = train_lines(runner)[600]
    assert (line["step"], line["epoch_loss"], line["280_loss"]) == (600, 149.5, np.arange(20, 300).mean())


def test_the_epoch_mean_of_a_scalar_of_some_iterations_is_over_these(make_runner):
    # the norm is reported by updates, every fourth iteration
    runner = make_runner(
        **count_up(8, accumulative_counts=4),
        train_cfg=dict(max_epochs=2),
        log_processor=make_means("epoch", sources=("loss", "grad_norm")),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=2)),
    )
    runner.train()
    lines = train_lines(runner)
    norms = [np.arange(4).mean(), np.arange(4, 8).mean()]
    found = [lines[step].get("epoch_grad_norm") for step in range(2, 17, 2)]
    assert found == pytest.approx([None, norms[0], norms[0], np.mean(norms)] * 2)
    assert [lines[step]["epoch_loss"] for step in range(2, 17, 2)] == [0.5, 1.5, 2.5, 3.5] * 2


@pytest.mark.parametrize("parallel", [None, dict(type="Pjit"), dict(type="DataParallel")])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_means_of_the_loss_count_only_the_real_examples_of_a_padded_batch(make_runner, parallel, steps_per_call):
    y = np.array([1] * 16 + [10] * 4, np.float32)
    runner = make_runner(
        model=FunctionalModel(lambda: {"w": jnp.zeros(1)}, lambda p, b: jnp.square(b["x"] @ p["w"] - b["y"])),
        train_dataloader=dict(
            batch_size=8, drop_last=False, dataset=ArrayDataset(dict(x=np.ones((20, 1), np.float32), y=y)),
            sampler=dict(type="DefaultSampler", shuffle=False),
        ),
        train_cfg=dict(max_epochs=1, steps_per_call=steps_per_call),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0), clip_grad=dict(max_norm=1e9)),
        val_dataloader=None, val_cfg=None, val_evaluator=None, parallel=parallel,
        log_processor=make_means("epoch", "global", 2, sources=("loss", "grad_norm")),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=3)),
    )  # fmt: skip
    runner.train()
    (line,) = train_lines(runner).values()
    expected = np.square(y).mean()
    assert (line["loss"], line["epoch_loss"], line["global_loss"]) == pytest.approx((expected,) * 3)
    assert line["2_loss"] == pytest.approx((8 * 1 + 4 * 100) / 12)
    assert line["epoch_grad_norm"] == pytest.approx((2 + 2 + 20) / 3)  # of a step, not of an example
    assert "(weight)" not in line


@pytest.mark.parametrize("steps_per_call", [1, 10])
def test_a_dropped_step_has_no_part_in_the_means(make_runner, steps_per_call):
    y = np.ones(20, np.float32)
    y[6], y[13] = np.nan, 1e6  # one that is not finite, and a spike
    runner = make_runner(
        model=FunctionalModel(lambda: {"w": jnp.zeros(1)}, lambda p, b: jnp.square(b["x"] @ p["w"] - b["y"])),
        train_dataloader=dict(
            batch_size=1, dataset=ArrayDataset(dict(x=np.ones((20, 1), np.float32), y=y)),
            sampler=dict(type="DefaultSampler", shuffle=False),
        ),
        train_cfg=dict(max_epochs=1, steps_per_call=steps_per_call),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        val_dataloader=None, val_cfg=None, val_evaluator=None,
        custom_hooks=[dict(type="NumericsGuardHook", spike_factor=10, window=3)],
        log_processor=make_means("epoch", "global"),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=10)),
    )  # fmt: skip
    runner.train()
    for line in train_lines(runner).values():
        assert (line["loss"], line["epoch_loss"], line["global_loss"]) == (1.0, 1.0, 1.0)
    assert line["dropped_steps"] == 2.0
    losses = runner.message_hub.get_scalar("train/loss").data[0]
    assert losses[13] == pytest.approx(1e12)  # what happened is still there


def test_one_nan_without_a_guard_does_not_stay_in_the_means(make_runner):
    arguments = count_up(20)
    arguments["model"] = FunctionalModel(lambda: {"w": jnp.zeros(1)}, lambda p, b: b["y"] + b["x"] @ p["w"])
    arguments["train_dataloader"]["dataset"].arrays["y"][6] = np.nan
    runner = make_runner(
        **arguments,
        train_cfg=dict(max_epochs=1, on_nonfinite="ignore"),
        log_processor=make_means("epoch"),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=20)),
    )
    runner.train()
    (line,) = train_lines(runner).values()
    assert line["epoch_loss"] == pytest.approx((sum(range(20)) - 6) / 19)
