import json
import logging
import math
import multiprocessing
import os
import pathlib
import re
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine import checkpoint
from jengine.checkpoint import WorkDirLockedError
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset, DataLoader
from jengine.hooks import Hook
from jengine.logging import console
from jengine.model import FunctionalModel
from jengine.parallel.interrupts import Interrupts, WaitedLoader
from jengine.parallel.processes import SingleProcess

SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=dict(type="LoggerHook", interval=1))


class SignalAt(Hook):
    """Send a signal to the process in the middle of an iteration."""

    def __init__(self, signum, iteration):
        self.signum, self.iteration = signum, iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            os.kill(os.getpid(), self.signum)


class FailAt(Hook):
    def __init__(self, stage, iteration, error=ZeroDivisionError):
        def fail(runner, **arguments):
            if runner.iter == iteration:
                raise error("mine")

        setattr(self, stage, fail)


def scalars(runner):
    """Return the logged lines without times."""
    lines = (pathlib.Path(runner.log_dir) / "vis_data" / "scalars.json").read_text().splitlines()
    clock = re.compile("time|seconds/|speed/")
    return [{k: v for k, v in json.loads(line).items() if not clock.search(k)} for line in lines]


@pytest.mark.parametrize(
    ("signum", "error", "code"), [(signal.SIGTERM, SystemExit, 143), (signal.SIGINT, KeyboardInterrupt, None)]
)
def test_a_signal_ends_the_run_after_the_iteration_and_saves_it(make_runner, tmp_path, signum, error, code):
    whole = make_runner(work_dir=tmp_path / "whole", default_hooks=SAVE)
    expected = whole.train()
    before = signal.getsignal(signum)
    broken = make_runner(work_dir=tmp_path / "broken", default_hooks=SAVE, custom_hooks=[SignalAt(signum, 5)])
    with pytest.raises(error) as caught:
        broken.train()
    assert code is None or caught.value.code == code
    assert signal.getsignal(signum) is before
    newest = checkpoint.find_latest(tmp_path / "broken")
    assert pathlib.Path(newest).name == "iter_6"
    resumed = make_runner(work_dir=tmp_path / "broken", default_hooks=SAVE, resume=True)
    state = resumed.train()
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    assert scalars(resumed) == scalars(whole)


class EndOfTime(Hook):
    """Do in the first iteration what the timer of `train_cfg.max_time` does, which could come before it."""

    def next_step(self, runner, step):
        return math.inf if step else 0

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.run.interrupts.stop("train_cfg.max_time='12h'")


@pytest.mark.parametrize(
    ("length", "done"),
    [
        (dict(by_epoch=True, max_epochs=2), 1),
        (dict(by_epoch=False, max_iters=8), 1),
        (dict(by_epoch=True, max_epochs=2, steps_per_call=2), 2),
    ],
    ids=["epochs", "iterations", "chunks"],
)
def test_max_time_saves_and_ends_with_the_code_that_asks_for_a_requeue(make_runner, tmp_path, length, done):
    expected = make_runner(work_dir=tmp_path / "whole", train_cfg=length).train()
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False))
    limited = make_runner(train_cfg=dict(length, max_time="12h"), default_hooks=hooks, custom_hooks=[EndOfTime()])
    with pytest.raises(SystemExit) as caught:
        limited.train()
    assert caught.value.code == 143
    log = (pathlib.Path(limited.log_dir) / f"{limited.timestamp}.log").read_text()
    assert (
        f"Interrupted by train_cfg.max_time='12h', to be started again (exit code 143) after iteration {done}; "
        f"saved: iter_{done}." in log
    )
    again = make_runner(train_cfg=dict(length, max_time="12:00:00"), default_hooks=hooks, resume=True)
    state = again.train()
    assert again.iter == 8
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)


class WaitForTheEnd(Hook):
    """Wait in each iteration until the run is asked to end."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        while runner.run.interrupts.signum is None:
            time.sleep(0.001)


def test_max_time_counts_from_the_call_of_train_and_holds_in_a_thread_without_signals(make_runner):
    runner = make_runner(train_cfg=dict(max_epochs=2, max_time="0.001s"), custom_hooks=[WaitForTheEnd()])
    codes = []

    def train():
        try:
            runner.train()
        except SystemExit as error:
            codes.append(error.code)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(60)
    assert codes == [143]


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGUSR1])
def test_signals_of_schedulers_and_terminals_save_the_run_too(make_runner, tmp_path, signum):
    runner = make_runner(default_hooks=SAVE, custom_hooks=[SignalAt(signum, 5)])
    with pytest.raises(SystemExit) as caught:
        runner.train()
    assert caught.value.code == 128 + signum
    assert pathlib.Path(checkpoint.find_latest(tmp_path / "run")).name == "iter_6"
    assert signal.getsignal(signum) is signal.SIG_DFL
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert f"Interrupted by {signal.Signals(signum).name} after iteration 6; saved: iter_6." in log


def test_an_ignored_signal_and_one_with_a_handler_are_left_alone(make_runner):
    received = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    signal.signal(signal.SIGUSR1, lambda signum, frame: received.append(signum))
    try:
        make_runner(custom_hooks=[SignalAt(signal.SIGHUP, 2), SignalAt(signal.SIGUSR1, 3)]).train()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert received == [signal.SIGUSR1]


def test_the_environment_names_the_signals_that_end_a_run(make_runner, tmp_path, monkeypatch):
    monkeypatch.setenv("JENGINE_STOP_SIGNALS", "SIGTERM, SIGURG")  # the system ignores SIGURG by default
    with pytest.raises(SystemExit) as caught:
        make_runner(custom_hooks=[SignalAt(signal.SIGURG, 2)]).train()
    assert caught.value.code == 128 + signal.SIGURG
    monkeypatch.setenv("JENGINE_STOP_SIGNALS", "SIGTREM")
    with pytest.raises(ConfigError, match="JENGINE_STOP_SIGNALS must be names of .* got 'SIGTREM'; did you mean 'SIGT"):
        make_runner(work_dir=tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_an_error_of_a_hook_after_a_failure_does_not_hide_the_first(make_runner):
    hooks = [FailAt("before_train_iter", 2), FailAt("on_failure", 2, OSError)]
    runner = make_runner(custom_hooks=hooks)
    with pytest.raises(ZeroDivisionError, match="mine"):
        runner.train()
    assert runner.iter == int(runner.state.step) == 2


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (dict(type="CheckpointHook"), "saved: iter_6. To continue: Runner(..., resume=True)"),
        (
            dict(type="CheckpointHook", out_dir="{out}"),
            "saved: iter_6. To continue: Runner(..., resume='{out}/run/iter_6')",
        ),
        (None, "nothing is saved: the run has no checkpoint."),
    ],
)
def test_an_interrupted_run_logs_what_is_saved_and_how_to_continue(make_runner, tmp_path, hook, expected):
    out = str(tmp_path / "out")
    if hook is not None:
        hook = {name: value.format(out=out) for name, value in hook.items()}
    runner = make_runner(default_hooks=dict(checkpoint=hook), custom_hooks=[SignalAt(signal.SIGTERM, 5)])
    with pytest.raises(SystemExit):
        runner.train()
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert f"INFO - Interrupted by SIGTERM after iteration 6; {expected.format(out=out)}\n" in log
    assert "\nTime\n" in log.split("Interrupted")[1]
    assert "checkpoints: " in log.split("Interrupted")[1]


def test_a_signal_ends_a_running_validation(make_runner, tmp_path):
    class InValidation(Hook):
        def before_val_iter(self, runner, batch_idx, data_batch=None):
            os.kill(os.getpid(), signal.SIGTERM)

        def after_val_epoch(self, runner, metrics=None):
            pytest.fail("the validation continued")

    with pytest.raises(SystemExit):
        make_runner(default_hooks=SAVE, custom_hooks=[InValidation()], validates=True).train()
    assert pathlib.Path(checkpoint.find_latest(tmp_path / "run")).name == "epoch_1"


class Hangs:
    """A dataset that sends SIGTERM to the run after some reads, and then delivers nothing."""

    def __init__(self, dataset, pid, released=None):
        self.dataset, self.pid, self.released, self.reads = dataset, pid, released, 0

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        self.reads += 1
        if self.reads == 200:  # long after those for the shapes
            os.kill(self.pid, signal.SIGTERM)
            (self.released or threading.Event()).wait()
        return self.dataset[index]


@pytest.mark.parametrize("settings", [dict(num_workers=1), dict(num_threads=1), dict()])
def test_a_signal_ends_a_run_whose_data_hang_and_leaves_nothing_that_keeps_the_process(make_runner, tmp_path, settings):
    released = threading.Event() if settings.get("num_threads") else None  # which cannot be pickled
    data = dict(batch_size=4, dataset=Hangs(make_runner().train_dataloader.dataset, os.getpid(), released), **settings)
    hooks = dict(checkpoint=dict(type="CheckpointHook"), logger=None)
    before = [thread for thread in threading.enumerate() if not thread.daemon]
    runner = make_runner(train_dataloader=data, train_cfg=dict(max_epochs=99, val_begin=100), default_hooks=hooks, validates=True)
    with pytest.raises(SystemExit) as caught:
        runner.train()
    assert caught.value.code == 143
    assert checkpoint.read_meta(checkpoint.find_latest(tmp_path / "run"))["meta"]["iter"] == runner.iter
    for process in multiprocessing.active_children():
        process.join(10)  # which was killed
    assert multiprocessing.active_children() == []
    assert [thread for thread in threading.enumerate() if not thread.daemon] == before
    if released:
        released.set()
    runner.train_dataloader.close()


def test_a_signal_ends_a_validation_whose_data_hang(make_runner, tmp_path):
    def batches():
        yield {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}
        if runner.iter:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()

    runner = make_runner(default_hooks=SAVE, val_dataloader=batches, validates=True)
    with pytest.raises(SystemExit):
        runner.train()
    assert pathlib.Path(checkpoint.find_latest(tmp_path / "run")).name == "epoch_1"


class KeyHook(Hook):
    """Keep a typed key in the state and split it in each step."""

    def init_traced_state(self, params, model_state):
        return {"key": jax.random.key(3)}

    def traced_update(self, ctx):
        return ctx.replace(hook_state={"key": jax.random.split(ctx.hook_state["key"])[0]})


def with_typed_keys():
    """Return the arguments of a run whose model, optimizer and hook have a typed key in their states."""

    def init():
        return {"w": jnp.zeros(2)}, {"key": jax.random.key(7)}

    def loss(params, model_state, batch):
        key, used = jax.random.split(model_state["key"])
        noise = 0.01 * jax.random.normal(used)
        return jnp.square(batch["x"] @ params["w"] - batch["y"] + noise), {"key": key}

    return dict(
        model=FunctionalModel(init, loss),
        optim_wrapper=optax.chain(optax.add_noise(0.01, 0.5, key=jax.random.key(0)), optax.sgd(0.1)), default_hooks=SAVE,
    )  # fmt: skip


@pytest.mark.parametrize("end", ["error", "signal", "time", "waiting"])
def test_a_run_with_typed_keys_in_its_state_saves_at_each_early_end(make_runner, tmp_path, end):
    cfg = with_typed_keys()
    expected = make_runner(work_dir=tmp_path / "whole", custom_hooks=[KeyHook()], **cfg).train()
    data = [batch for _ in range(2) for batch in make_runner().train_dataloader]

    def batches():
        for i, batch in enumerate(data):
            if i == 5 and end == "error" and broken.iter:
                raise OSError("the disk is gone")
            if i == 5 and end == "waiting" and broken.iter:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait()
            yield batch

    ends = dict(signal=[SignalAt(signal.SIGTERM, 5)], time=[EndOfTime()])
    failing = dict(train_dataloader=batches, train_cfg=dict(by_epoch=False, max_iters=8)) if end not in ends else {}
    broken = make_runner(custom_hooks=[KeyHook(), *ends.get(end, [])], **{**cfg, **failing})
    with pytest.raises(
        OSError if end == "error" else SystemExit, match="the disk is gone" if end == "error" else "143"
    ):
        broken.train()
    assert broken.iter > 0
    assert pathlib.Path(checkpoint.find_latest(tmp_path / "run")).name == f"iter_{broken.iter}"
    if end in ends:
        state = make_runner(custom_hooks=[KeyHook()], resume=True, **cfg).train()
        jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)


def test_a_wait_for_data_is_logged_with_the_loader_and_the_batch(monkeypatch):
    monkeypatch.setattr("jengine.parallel.interrupts._AFTER", 0.06)
    interrupts = Interrupts(SingleProcess())
    loader = DataLoader(ArrayDataset({"x": np.zeros(8)}), 2)
    loader.set_epoch(1, start=2)
    arrived, lines = threading.Event(), []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
            arrived.set()

    logger = console.current_logger()
    handler = Lines()
    logger.addHandler(handler)
    try:
        for _ in range(100):  # short waits
            interrupts.start_waiting(WaitedLoader("others", loader))
            interrupts.wait.since = None
        interrupts.start_waiting(WaitedLoader("train_dataloader", loader))
        assert arrived.wait(10)
        interrupts.wait.since = None
    finally:
        logger.removeHandler(handler)
    text = "The run has waited 0 s for train_dataloader (DataLoader(ArrayDataset)), batch 3 of pass 2."
    assert lines[0] == text
    assert [line for line in lines if line.startswith("The run has waited")] == [text]


def test_a_log_line_that_fails_does_not_keep_a_signal_from_saving(make_runner, tmp_path):
    runner = make_runner(
        train_cfg=dict(by_epoch=False, max_iters=8, val_interval=99),
        default_hooks={**SAVE, "logger": dict(type="LoggerHook", interval=6)},
        custom_hooks=[SignalAt(signal.SIGTERM, 5)], validates=True,
    )

    def fail(*args):
        raise OSError("no space left on device")

    runner.log_processor.get_log_after_iter = fail
    with pytest.raises(SystemExit):
        runner.train()
    assert pathlib.Path(checkpoint.find_latest(tmp_path / "run")).name == "iter_6"
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert "The log could not be written: OSError: no space left on device" in log


def test_outside_the_main_thread_signal_handlers_do_not_change(make_runner):
    before, seen = signal.getsignal(signal.SIGTERM), []

    class Look(Hook):
        def before_train(self, runner):
            seen.append(signal.getsignal(signal.SIGTERM))

    runner = make_runner(custom_hooks=[Look()])
    thread = threading.Thread(target=runner.train)
    thread.start()
    thread.join()
    assert seen == [before]


def test_an_error_between_iterations_saves_the_completed_ones(make_runner, tmp_path):
    with pytest.raises(ZeroDivisionError, match="mine"):
        make_runner(default_hooks=SAVE, custom_hooks=[FailAt("before_val", 4)], validates=True).train()
    assert pathlib.Path(checkpoint.find_latest(tmp_path / "run")).name == "epoch_1"
    data = [dict(x=np.ones((4, 2), np.float32), y=np.ones(4, np.float32)) for _ in range(4)]

    class Breaks(list):
        def __iter__(self):
            yield from list.__iter__(self[:3])
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        make_runner(work_dir=tmp_path / "data", default_hooks=SAVE, train_dataloader=Breaks(data), validates=True).train()
    assert pathlib.Path(checkpoint.find_latest(tmp_path / "data")).name == "iter_3"


@pytest.mark.parametrize("stage", ["before_train_iter", "after_train_iter"])
def test_an_error_within_an_iteration_saves_nothing(make_runner, tmp_path, stage):
    runner = make_runner(default_hooks=SAVE, custom_hooks=[FailAt(stage, 5)])
    with pytest.raises(ZeroDivisionError):
        runner.train()
    assert pathlib.Path(checkpoint.find_latest(tmp_path / "run")).name == "epoch_1"
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert "Training ended within iteration 5, which is not saved." in log


def test_a_step_that_fails_with_its_donated_state_is_not_saved(make_runner, tmp_path):
    model = FunctionalModel(
        init=lambda: {"w": jnp.ones((2,))},
        loss=lambda params, batch: jnp.log(params["w"].sum() * 0 * batch["x"].sum()) * 0,  # 0 * -inf
        predict=lambda params, batch: batch["y"],
    )
    runner = make_runner(model=model, default_hooks=SAVE)
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError):
            runner.train()
    finally:
        jax.config.update("jax_debug_nans", False)
    assert checkpoint.list_checkpoints(tmp_path / "run") == []


def test_a_resumed_run_continues_its_scalar_files_from_the_checkpoint(make_runner, tmp_path):
    whole = make_runner(work_dir=tmp_path / "whole", default_hooks=SAVE, train_cfg=dict(max_epochs=3), validates=True)
    whole.train()
    # killed in the second epoch: the lines of the iterations after the checkpoint are on disk already
    broken = make_runner(
        work_dir=tmp_path / "broken",
        default_hooks=SAVE,
        train_cfg=dict(max_epochs=3),
        custom_hooks=[FailAt("before_train_iter", 7)], validates=True,
    )
    with pytest.raises(ZeroDivisionError):
        broken.train()
    assert len(scalars(broken)) == 8  # 7 iterations and a validation
    resumed = make_runner(work_dir=tmp_path / "broken", default_hooks=SAVE, train_cfg=dict(max_epochs=3), resume=True, validates=True)
    resumed.train()
    assert resumed.log_dir == broken.log_dir
    assert scalars(resumed) == scalars(whole)


def test_a_resumed_run_has_no_duplicate_tensorboard_events(make_runner, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = dict(vis_backends=[dict(type="TensorboardVisBackend")])
    with pytest.raises(ZeroDivisionError):
        make_runner(default_hooks=SAVE, visualizer=board, custom_hooks=[FailAt("before_train_iter", 7)]).train()
    runner = make_runner(default_hooks=SAVE, visualizer=board, resume=True)
    runner.train()
    events = EventAccumulator(os.path.join(runner.log_dir, "vis_data"))
    events.Reload()
    assert [event.step for event in events.Scalars("lr")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_two_runs_do_not_share_a_work_dir(make_runner):
    class Second(Hook):
        def before_train(self, runner):
            self.runner = make_runner()
            with pytest.raises(WorkDirLockedError, match=str(os.getpid())):
                self.runner.train()

    second = Second()
    make_runner(custom_hooks=[second]).train()
    assert second.runner.iter == 0
    second.runner.train()  # the lock was released
    assert second.runner.iter == 8


def test_weights_can_be_renamed_and_loaded_in_part(make_runner, tmp_path):
    trained = make_runner(default_hooks=SAVE, validates=True).train()
    other = FunctionalModel(
        init=lambda: {"head": {"w": jnp.zeros((2,)), "scale": jnp.full((), 7.0)}},
        loss=lambda params, batch: jnp.square(batch["x"] @ params["head"]["w"] - batch["y"]),
        predict=lambda params, batch: batch["x"] @ params["head"]["w"],
    )
    source = dict(path=tmp_path / "run", rename=[("w", "head.w")])
    with pytest.raises(checkpoint.CheckpointMismatchError, match="head.scale"):
        make_runner(work_dir=tmp_path / "strict", model=other, load_from=source, validates=True).val()
    runner = make_runner(work_dir=tmp_path / "part", model=other, load_from={**source, "strict": False}, validates=True)
    runner.val()
    np.testing.assert_array_equal(runner.state.params["head"]["w"], trained.params["w"])
    assert runner.state.params["head"]["scale"] == 7.0
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert "WARNING - Loaded the weights of" in log
    with pytest.raises(TypeError, match="no argument 'renames'; did you mean 'rename'"):
        make_runner(load_from=dict(path=tmp_path / "run", renames=[]), validates=True)
