"""Test that a run has its files from the call of `train` on, and that its log says why it was refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jengine import checkpoint
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from tests.refusals import check_refusal


class Uint4Hook(Hook):
    """Keep a state that no checkpoint can store."""

    def init_traced_state(self, params, model_state):
        """Return the state."""
        return {"q": jnp.zeros(4, jnp.uint4)}


class RefusingHook(Hook):
    """Refuse the run in its last stage before the first step."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        """Raise an error."""
        raise ValueError("`RefusingHook` must not be here")


def labels(values, width=2):
    return ArrayDataset({"x": np.zeros((len(values), width), np.float32), "y": np.array(values, np.int32)})


ACCURACY = dict(type="Accuracy", label="y")
# The changes, and the words that must be in the message and in the log
CASES = {
    "an unknown entry of the batch": (dict(val_evaluator=ACCURACY | dict(label="z")), "`Accuracy.label`", "'z'"),
    "an unknown entry of the predictions": (dict(val_evaluator=ACCURACY | dict(prediction="logits")), "`Accuracy.prediction`", "'logits'"),
    "labels that do not fit the predictions": (dict(val_evaluator=ACCURACY), "predictions", "logits"),
    "another batch of the validation": (dict(val_dataloader=dict(batch_size=4, dataset=labels([0] * 6, width=3))), "val_dataloader", "x f32[4,3], y i32[4], mask bool[4]"),
    "a validation of texts": (dict(val_dataloader=["text"]), "`val_dataloader`"),
    "a batch without targets": (dict(train_dataloader=[{"x": np.zeros((4, 2), np.float32)}]), "train_dataloader", "x f32[4,2]"),
    "a dtype that is not saved": (dict(custom_hooks=[Uint4Hook()], default_hooks=None), "`hook_state.Uint4Hook.q`", "uint4"),
    "a hook that refuses": (dict(custom_hooks=[RefusingHook()]), "`RefusingHook`"),
    "an average that begins after the end": (dict(custom_hooks=[dict(type="EMAHook", begin_epoch=9)]), "begin_epoch", "max_epochs=2", "got 9"),
    "more iterations than the device counts": (dict(train_cfg=dict(max_epochs=2**31 - 1)), "`train_cfg`", "2147483647"),
    "weights of another model": (dict(load_from={"other": np.zeros(3)}), "0 match, 2 missing, 1 unexpected"),
}  # fmt: skip


def read_log(directory):
    (log,) = directory.rglob("*.log")
    return log.read_text()


@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_what_depends_on_the_data_is_refused_before_a_step_and_the_log_says_why(make_runner, tmp_path, row):
    changes, *words = row
    runner = make_runner(work_dir=tmp_path / "runs" / "first", validates=True, **changes)
    assert list(tmp_path.iterdir()) == []
    check_refusal(runner.train, (TypeError, ValueError, KeyError), *words)
    log = read_log(tmp_path / "runs" / "first")
    assert [word for word in words if word not in log] == []
    assert runner.iter == 0
    assert checkpoint.find_latest(tmp_path / "runs" / "first") is None


def test_a_state_that_is_not_saved_may_have_any_dtype(make_runner):
    assert make_runner(custom_hooks=[Uint4Hook()]).train().step == 8


def test_a_refused_evaluation_is_in_the_log(make_runner, tmp_path):
    runner = make_runner(val_evaluator=dict(type="Accuracy", label="z"), validates=True)
    check_refusal(runner.val, KeyError, "`Accuracy.label`")
    assert "`Accuracy.label`" in read_log(tmp_path)


def test_a_run_that_fails_in_its_first_step_leaves_a_work_dir_with_a_log_that_says_so(make_runner, tmp_path):
    runner = make_runner(cfg=dict(note="x"), custom_hooks=[RefusingHook()])
    with pytest.raises(ValueError, match="RefusingHook"):
        runner.train()
    assert "Training stops at iteration 0 with ValueError: `RefusingHook` must not be here" in read_log(tmp_path)
    assert 'note' in (tmp_path / "run" / "config.py").read_text()
    (record,) = tmp_path.rglob("run.json")
    assert json.loads(record.read_text())["sessions"][0]["status"] == "stopped by ValueError"


def test_a_run_that_is_refused_before_its_first_step_leaves_the_checkpoints_of_another_run_in_place(make_runner, tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=2), logger=None)
    make_runner(default_hooks=hooks, validates=True).train()
    with pytest.raises(KeyError, match="Accuracy"):
        make_runner(default_hooks=hooks, val_evaluator=dict(type="Accuracy", label="z"), validates=True).train()
    assert checkpoint.find_latest(tmp_path / "run") == str(tmp_path / "run" / "epoch_2")
    make_runner(default_hooks=hooks, validates=True).train()
    assert (tmp_path / "run" / "earlier_1" / "epoch_2").is_dir()


def test_the_log_file_begins_with_training(make_runner, tmp_path):
    runner = make_runner()
    runner.logger.info("said before training")
    assert list(tmp_path.iterdir()) == []
    runner.train()
    assert "said before training" not in read_log(tmp_path)


def test_two_runs_that_are_built_before_either_trains_have_logs_of_their_own(make_runner):
    first, second = make_runner(), make_runner()
    assert first.log_dir != second.log_dir


def test_each_program_is_traced_once_with_the_checks(make_runner):
    runner = make_runner()
    runner.train()
    assert runner.programs.update.traces == 1
