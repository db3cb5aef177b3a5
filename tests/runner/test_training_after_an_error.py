"""Test that `train()` continues from a consistent state after an error or refuses, and ends with a stuck loader."""

import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine import checkpoint
from jengine.config.errors import ConfigError
from jengine.hooks import Hook

SINGLE, CHUNKS = dict(max_epochs=2), dict(max_epochs=2, steps_per_call=2)
SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None)


class FailOnce(Hook):
    """Raise at one stage, once, in the second of two epochs of 4 iterations or between them."""

    def __init__(self, stage):
        self.failed = False

        def fail(runner, *args, **kwargs):
            if runner.iter >= 4 and not self.failed:
                self.failed = True
                raise ZeroDivisionError("mine")

        setattr(self, stage, fail)

    def next_step(self, runner, step):
        return max(step, 5)  # with chunks of two steps the end of the third chunk


def schedules():
    return [dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=6), dict(type="StepLR", step_size=1)]


@pytest.mark.parametrize("train_cfg", [SINGLE, CHUNKS], ids=["single steps", "chunks"])
def test_training_continues_after_an_error_between_iterations(make_runner, tmp_path, train_cfg):
    settings = dict(param_scheduler=schedules(), train_cfg=train_cfg)
    expected = make_runner(tmp_path / "whole", **settings, validates=True).train()
    for stage in ("before_train_epoch", "before_val", "before_val_epoch", "before_val_iter", "after_val_iter"):
        runner = make_runner(tmp_path / stage, custom_hooks=[FailOnce(stage)], **settings, validates=True)
        with pytest.raises(ZeroDivisionError):
            runner.train()
        state = runner.train()
        assert runner.iter == int(state.step) == 8
        jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
        assert [entry[:2] for entry in runner.validations] == [(1, 4), (2, 8)]


@pytest.mark.parametrize("train_cfg", [SINGLE, CHUNKS], ids=["single steps", "chunks"])
def test_training_does_not_continue_after_an_error_that_some_hooks_have_not_seen(make_runner, tmp_path, train_cfg):
    settings = dict(param_scheduler=schedules(), train_cfg=train_cfg, default_hooks=SAVE)
    expected = make_runner(tmp_path / "whole", **settings, validates=True).train()
    for stage in ("before_train_iter", "after_train_iter", "after_train_epoch", "after_val_epoch", "after_val"):
        runner = make_runner(tmp_path / stage, custom_hooks=[FailOnce(stage)], **settings, validates=True)
        with pytest.raises(ZeroDivisionError):
            runner.train()
        with pytest.raises(RuntimeError, match=r"cannot continue: it stopped with an error at iteration \d"):
            runner.train()
        state = make_runner(tmp_path / stage, resume=True, **settings, validates=True).train()  # from the last checkpoint
        assert int(state.step) == 8
        jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)


@pytest.mark.parametrize(
    "train_cfg",
    [SINGLE, CHUNKS, dict(max_epochs=2, steps_per_call=4)],  # in the last the error comes within the first chunk
    ids=["single steps", "chunks", "an incomplete first chunk"],
)
def test_training_continues_after_an_error_of_the_loader(make_runner, tmp_path, train_cfg):
    rng = np.random.default_rng(0)
    data = [dict(x=rng.normal(size=(4, 2)).astype(np.float32), y=np.ones(4, np.float32)) for _ in range(4)]

    class Breaks(list):
        failed = False

        def __iter__(self):
            for i, batch in enumerate(list.__iter__(self)):
                if i == 3 and not self.failed:
                    self.failed = True
                    raise OSError("the disk is gone")
                yield batch

    settings = dict(train_cfg=train_cfg, default_hooks=SAVE)
    expected = make_runner(tmp_path / "whole", train_dataloader=data, **settings).train()
    runner = make_runner(tmp_path / "broken", train_dataloader=Breaks(data), **settings)
    with pytest.raises(OSError, match="the disk is gone"):
        runner.train()
    assert pathlib.Path(checkpoint.find_latest(tmp_path / "broken")).name == "iter_3"
    state = runner.train()
    assert runner.iter == int(state.step) == 8
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)


@pytest.mark.parametrize("train_cfg", [SINGLE, CHUNKS], ids=["single steps", "chunks"])
def test_training_does_not_continue_after_a_step_that_failed(make_runner, train_cfg):
    from jengine.model import FunctionalModel

    model = FunctionalModel(
        init=lambda: {"w": jnp.ones((2,))},
        loss=lambda params, batch: jnp.log(params["w"].sum() * 0 * batch["x"].sum()) * 0,  # 0 * -inf
        predict=lambda params, batch: batch["y"],
    )
    runner = make_runner(model=model, train_cfg=train_cfg)
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError):
            runner.train()
    finally:
        jax.config.update("jax_debug_nans", False)
    iteration = runner.iter
    with pytest.raises(RuntimeError, match=f"cannot continue: .* at iteration {iteration}"):
        runner.train()
    assert runner.iter == iteration


class Stuck(list):
    """Yield a few batches and then wait for a worker thread that never delivers."""

    def __init__(self, batches, yielded):
        super().__init__(batches)
        self.yielded = yielded

    def __iter__(self):
        delivered = queue.Queue()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        yield from list.__iter__(self[: self.yielded])
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        delivered.get()


@pytest.mark.parametrize("train_cfg", [SINGLE, CHUNKS], ids=["single steps", "chunks"])
def test_a_signal_ends_a_run_with_a_stuck_loader_and_saves_it(make_runner, tmp_path, train_cfg):
    batch = dict(x=np.ones((4, 2), np.float32), y=np.ones(4, np.float32))
    runner = make_runner(
        train_dataloader=Stuck([batch] * 8, yielded=6), train_cfg={**train_cfg, "max_epochs": 1}, default_hooks=SAVE
    )
    start = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        runner.train()
    assert time.monotonic() - start < 30  # not forever; most of it is compiling
    assert caught.value.code == 143
    saved = pathlib.Path(checkpoint.find_latest(tmp_path / "run")).name
    assert saved == f"iter_{runner.iter}"
    assert runner.iter == int(runner.state.step) >= 4


class OnePass(list):
    """Yield the batches in the first complete pass only."""

    exhausted = False

    def __iter__(self):
        if not self.exhausted:
            for i in range(len(self)):
                self.exhausted = i + 1 == len(self)
                yield self[i]


@pytest.mark.parametrize("cfg", [dict(by_epoch=False, max_iters=9), dict(max_epochs=3)])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_loader_that_yields_nothing_ends_the_run_with_the_reason(make_runner, cfg, steps_per_call):
    batch = dict(x=np.ones((4, 2), np.float32), y=np.ones(4, np.float32))
    runner = make_runner(train_dataloader=OnePass([batch] * 4), train_cfg={**cfg, "steps_per_call": steps_per_call})
    with pytest.raises(ConfigError, match="train_dataloader yielded no batch in pass 2 over the data: its iterator is"):
        runner.train()
    assert runner.iter == 4


STUCK_STEP = """
import jax, jax.numpy as jnp, numpy as np, sys
from jengine.model import FunctionalModel
from jengine.runner import Runner


def loss(params, batch):
    w = jax.lax.stop_gradient(params["w"] * batch["x"].sum())  # the products make XLA run the step in the background
    product = jax.lax.while_loop(lambda c: c[0] >= 0, lambda c: (jnp.abs(c[0]), c[1] @ c[1]), (w[0, 0] * 0, w))[1]
    return params["w"].sum() + product.sum()


class Breaks:
    def __iter__(self):
        yield dict(x=np.ones((4, 2), np.float32))
        raise OSError("the disk is gone")


model = FunctionalModel(init=lambda: {"w": jnp.ones((128, 128))}, loss=loss, predict=lambda params, batch: batch["x"])
Runner(
    model, sys.argv[1], Breaks(), train_cfg=dict(by_epoch=False, max_iters=9),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)), default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
).train()
"""


def test_an_error_is_shown_and_ends_the_process_although_a_step_never_finishes(tmp_path):
    environment = {**os.environ, "JENGINE_FAILURE_TIMEOUT": "0.2", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", STUCK_STEP, str(tmp_path / "run")],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith(
        "OSError: the disk is gone\nin train_dataloader (Breaks), batch 2 of pass 1\n"
        "in training, at iteration 1 (epoch 0)\n"
    )
    unfinished = done.stdout.split("Training stops at iteration 1 with OSError.\n")[1]
    assert "The run has waited 0 s for the device (JENGINE_FAILURE_TIMEOUT) and ends without that." in unfinished
    (log,) = (tmp_path / "run").glob("*/*.log")
    assert "Training stops at iteration 1 with OSError: the disk is gone\n" in log.read_text()
    assert "OSError: the disk is gone" in log.read_text().split("OSError ended the run")[1]
    assert "step_failed" in log.read_text().split("All threads:\n")[1]  # where it waits


STUCK_BACKEND = """
import concurrent.futures, jax.numpy as jnp, numpy as np, sys, threading
from jengine.model import FunctionalModel
from jengine.config import VISBACKENDS
from jengine.runner import Runner
from jengine.logging import LocalVisBackend


@VISBACKENDS.register_module()
class Unreachable(LocalVisBackend):
    def close(self):  # as a client that sends its last records from a pool of threads
        concurrent.futures.ThreadPoolExecutor().submit(threading.Event().wait).result()


class Breaks:
    def __iter__(self):
        yield dict(x=np.ones((4, 2), np.float32))
        raise OSError("the disk is gone")


Runner(
    FunctionalModel(init=lambda: {"w": jnp.ones(2)}, loss=lambda params, batch: (batch["x"] @ params["w"]).mean()),
    sys.argv[1], Breaks(), train_cfg=dict(by_epoch=False, max_iters=9), visualizer=dict(vis_backends=["Unreachable"]),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
).train()
"""


def test_an_error_ends_the_process_although_a_service_never_answers(tmp_path):
    environment = {**os.environ, "JENGINE_FAILURE_TIMEOUT": "0.2"}
    done = subprocess.run(
        [sys.executable, "-c", STUCK_BACKEND, str(tmp_path / "run")],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("OSError: the disk is gone") == 1
    assert done.stdout.splitlines()[-1].endswith(
        "The run has waited 0 s for the log (JENGINE_FAILURE_TIMEOUT) and ends without that."
    )
    assert (tmp_path / "run" / "iter_1").is_dir()
