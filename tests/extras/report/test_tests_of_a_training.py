"""Test that a test belongs to the training whose weights it used, in tables and reports."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from jengine.extras.report import collect_data
from jengine.extras.report.run_files import NoRunError
from jengine.extras.report.run_table import read_table

DATA = [{"x": np.zeros((4, 2), np.float32), "y": np.ones(4, np.float32)}]
TEST = dict(test_dataloader=DATA, test_cfg=dict(), test_evaluator=dict(type="MeanLoss", loss=lambda p, b: (p - b["y"]) ** 2))


@pytest.fixture
def make(make_runner, tmp_path):
    def make(name="work", **changes):
        hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1))
        return make_runner(validates=True, work_dir=str(tmp_path / name), default_hooks=hooks, **TEST, **changes)

    return make


def read_tests(log_dir):
    path = pathlib.Path(log_dir, "tests.json")
    return [(test["checkpoint"], test["iter"]) for test in json.loads(path.read_text())["tests"]] if path.exists() else []


def test_the_newest_training_is_shown_with_the_tests_of_its_weights(make, tmp_path):
    first = make()
    first.train()
    config = (tmp_path / "work/config.py").read_text()
    loss = make(load_from=str(tmp_path / "work")).test()["loss"]
    # in another work dir, of another checkpoint
    make("elsewhere", load_from=str(tmp_path / "work/epoch_1")).test()
    assert read_tests(first.log_dir) == [("epoch_2", first.iter), ("epoch_1", first.iter // 2)]
    assert (tmp_path / "work/config.py").read_text() == config  # without load_from
    make(load_from=str(tmp_path / "work")).test()  # replaces the first one
    assert read_tests(first.log_dir) == [("epoch_1", first.iter // 2), ("epoch_2", first.iter)]
    (run,) = collect_data([str(tmp_path / "work")])["runs"]
    assert run["path"] == first.log_dir
    assert [test["checkpoint"] for test in run["tests"]] == ["epoch_1", "epoch_2"]
    assert {series["mode"] for series in run["series"]} >= {"train", "val"}
    (row,) = read_table([tmp_path / "work"]).rows
    assert row.final["test/loss"] == pytest.approx(loss)
    assert row.status == "finished"
    with pytest.raises(NoRunError, match="only tests, which are shown with the training of their weights"):
        read_table([tmp_path / "elsewhere"])
    assert [row.name for row in read_table([tmp_path]).rows] == ["work"]


def test_a_test_of_an_earlier_training_is_not_one_of_the_newest(make, tmp_path):
    first = make()
    first.train()
    old = shutil.copytree(tmp_path / "work/epoch_2", tmp_path / "work/old/epoch_2")
    second = make()
    second.train()
    make(load_from=str(old)).test()
    assert read_tests(first.log_dir) == [("epoch_2", first.iter)]
    assert read_tests(second.log_dir) == []
    (run,) = collect_data([str(tmp_path / "work")])["runs"]
    assert (run["path"], run["tests"]) == (second.log_dir, [])


def test_a_test_in_the_process_of_the_training_belongs_to_it_also_after_other_weights(make, tmp_path):
    make("other").train()
    runner = make(load_from=str(tmp_path / "other"))
    runner.train()
    runner.test()
    assert read_tests(runner.log_dir) == [("", runner.iter)]
    assert not list((tmp_path / "other").glob("*/tests.json"))


def test_weights_without_the_logs_of_their_training_add_nothing(make, tmp_path):
    runner = make()
    runner.train()
    copy = shutil.copytree(tmp_path / "work/epoch_2", tmp_path / "copy/deep/epoch_2")
    make("elsewhere", load_from=str(copy)).test()
    assert not list(tmp_path.glob("**/tests.json"))


def test_tests_of_any_form_are_read_as_far_as_they_can_be(make, tmp_path):
    runner = make()
    runner.train()
    text = json.dumps({"tests": [{"checkpoint": "a", "metrics": {"loss": 1.0, "note": "x", "time": 2.0}}, {"metrics": {}}]})
    pathlib.Path(runner.log_dir, "tests.json").write_text(text)
    (run,) = collect_data([str(tmp_path / "work")])["runs"]
    assert run["tests"] == [{"checkpoint": "a", "metrics": {"loss": 1.0}}]
    pathlib.Path(runner.log_dir, "tests.json").write_text('{"tests": [1]}')
    assert collect_data([str(tmp_path / "work")])["runs"][0]["tests"] == []
    make(load_from=str(tmp_path / "work")).test()  # a warning
