"""Count what an ordinary iteration, and building a Runner, do, as one would count allocations."""

import os
import sys

import numpy as np

import jengine
from jengine import Runner, load_config
from jengine.data import ArrayDataset
from jengine.hooks import Hook

PACKAGE = os.path.dirname(jengine.__file__)
ARRAYS = dict(x=np.ones((128, 2), np.float32), y=np.ones(128, np.float32))


class CountCalls(Hook):
    """Record the Python functions of jengine that are called from the end of iteration 16 to that of iteration 17."""

    priority = "LOWEST"

    def __init__(self):
        self.called = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 16:
            sys.setprofile(self._record)
        elif runner.iter == 17:
            sys.setprofile(None)

    def _record(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.called.append(f"{os.path.relpath(frame.f_code.co_filename, PACKAGE)}:{frame.f_code.co_name}")


def test_an_ordinary_iteration_has_at_most_50_python_calls(make_runner):
    calls = CountCalls()
    make_runner(
        train_dataloader=dict(dataset=ArrayDataset(ARRAYS), batch_size=4),
        train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3), clip_grad=dict(max_norm=1.0)),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=False, end=32),
        custom_hooks=[dict(type="EMAHook"), calls],
    ).train()
    assert 30 < len(calls.called) <= 50, calls.called


def test_a_runner_is_built_from_a_config_with_at_most_1000_python_calls(tmp_path):
    calls = CountCalls()
    for path in ("first", "second"):  # the first one imports, and reads the signatures of classes
        cfg = load_config("configs/digits_cnn.py", [f"work_dir={tmp_path / path}", "log_level=ERROR"])
        calls.called.clear()
        sys.setprofile(calls._record)
        try:
            Runner.from_cfg(cfg)
        finally:
            sys.setprofile(None)
    assert 500 < len(calls.called) <= 1000, calls.called
