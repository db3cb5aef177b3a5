import json
import pathlib
import platform
import sys

import jax
import numpy as np
import pytest

from jengine.checkpoint import read_meta
from jengine.extras.report.page import collect_data
from jengine.hooks import Hook


class StopAt(Hook):
    """Raise an error at an iteration."""

    def __init__(self, iteration):
        self.iteration = iteration

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == self.iteration:
            raise RuntimeError("stop")


def read_record(runner):
    return json.loads(pathlib.Path(runner.log_dir, "run.json").read_text())


def test_a_checkpoint_names_the_versions_of_python_jax_and_the_platform(make_runner):
    runner = make_runner(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=2), logger=None))
    runner.train()
    versions = read_meta(pathlib.Path(runner.work_dir, "epoch_2"))["meta"]["versions"]
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (versions["jax"], versions["numpy"]) == (jax.__version__, np.__version__)
    assert versions["platform"] == platform.platform()
    assert "flax" in versions


def test_a_finished_run_records_its_groups_times_versions_and_progress(make_runner):
    schedule = dict(type="LinearLR", start_factor=0.5, by_epoch=False, end=4)
    runner = make_runner(
        default_hooks=dict(logger=dict(type="LoggerHook", interval=2), checkpoint=None), param_scheduler=schedule, validates=True
    )
    runner.train()
    record = read_record(runner)
    assert (record["max_iters"], record["max_epochs"], record["epoch_length"]) == (8, 2, 4)
    assert record["model"] == {"tensors": 2, "parameters": 3, "bytes": 12}
    assert record["groups"]["rows"][0][-2:] == ["0.1", "0"]  # the learning rate before the warm-up
    (session,) = record["sessions"]
    assert (session["status"], session["first_iter"], session["iter"], session["epoch"]) == ("finished", 0, 8, 2)
    assert {"setup", "compile", "step", "validation"} <= set(session["seconds"])
    assert {"jengine", "python", "jax", "flax", "optax", "orbax-checkpoint"} <= set(session["versions"])

    runner.val()
    assert read_record(runner)["sessions"][0]["status"] == "finished"

    (run,) = collect_data([runner.work_dir], images=1)["runs"]
    losses = {item["mode"]: item for item in run["series"] if item["name"] == "loss"}
    assert losses["train"]["x"] == [2, 4, 6, 8]
    assert losses["val"]["y"][:2] == pytest.approx([metrics["loss"] for _, _, metrics in runner.validations[:2]])
    assert (run["status"], run["iter"], run["notes"]) == ("finished", 8, [])


def test_a_failed_run_records_the_error_and_a_resumed_one_a_second_session(make_runner):
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None)
    runner = make_runner(default_hooks=hooks, custom_hooks=[StopAt(5)])
    with pytest.raises(RuntimeError, match="stop"):
        runner.train()
    assert read_record(runner)["sessions"][0]["status"] == "stopped by RuntimeError"
    resumed = make_runner(default_hooks=hooks, resume=True)
    resumed.train()
    first, second = read_record(resumed)["sessions"]
    assert (first["status"], first["iter"]) == ("stopped by RuntimeError", 5)
    assert (second["status"], second["first_iter"], second["iter"]) == ("finished", 4, 8)


def test_a_run_that_only_validates_has_no_record(make_runner):
    runner = make_runner(validates=True)
    runner.val()
    assert not pathlib.Path(runner.log_dir, "run.json").exists()
