import dataclasses
import math
import os

import pytest

from jengine.checkpoint import load, read_meta
from jengine.config import HOOKS
from jengine.hooks import CheckpointHook, Hook
from tests.refusals import check_refusal
from tests.runner_fixture import QuickRunner


class FakeCheckpointer:
    """Keep a list of paths instead of directories."""

    def __init__(self, paths):
        self.paths = paths
        self.saved = []

    def save(self, path, state, meta, *, latest, evict, checksums):
        self.saved.append(os.path.basename(path))
        evict = [os.path.join(os.path.dirname(path), name) for name in evict]
        self.paths = [old for old in self.paths if old not in (path, *evict)] + [path]
        self.pointer = path if latest else getattr(self, "pointer", None)

    def evict(self, directory, names):
        self.paths = [old for old in self.paths if old not in [os.path.join(directory, name) for name in names]]

    def wait(self):
        pass


class Recorder(Hook):
    """Record what each checkpoint contains."""

    priority = "LOWEST"

    def __init__(self):
        self.saves = []

    def before_save_checkpoint(self, runner, checkpoint):
        self.saves.append(dict(checkpoint))


def progress(saves):
    return [(checkpoint["meta"]["epoch"], checkpoint["meta"]["iter"]) for checkpoint in saves]


def kept_names(runner):
    return [os.path.basename(path) for path in runner.checkpointer.paths]


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a QuickRunner in `exp` whose checkpoints are a list of paths."""

    def make(hook, validations=(), existing=(), on_disk=False, **settings):
        recorder = Recorder()
        runner = QuickRunner(tmp_path / "exp", [hook, recorder], validations=validations, **settings)
        runner.hook, runner.saves = hook, recorder.saves
        if not on_disk:
            fake = FakeCheckpointer([os.path.join(runner.work_dir, name) for name in existing])
            runner.run = dataclasses.replace(runner.run, checkpointer=fake)
        return runner

    return make


@pytest.fixture
def train(make):
    """Return a function that trains with a CheckpointHook of the given settings, and returns the Runner."""

    def train(*, epochs, epoch_length=1, scores=(), key="acc", stop_after=None, nan_from=math.inf, **settings):
        validations = [{key: score} for score in scores]
        length = dict(epochs=epochs, epoch_length=epoch_length, stop_after=stop_after)
        runner = make(CheckpointHook(**settings), validations, **length)
        runner.nan_from = nan_from
        runner.train()
        return runner

    return train


# --- Regular checkpoints. ---


@pytest.mark.parametrize(
    ("settings", "epochs", "saved"),
    [
        ({"interval": 5}, 20, [5, 10, 15, 20]),
        ({"interval": 5}, 12, [5, 10, 12]),
        ({"interval": 5, "save_last": False}, 12, [5, 10]),
        ({"interval": 2, "save_begin": 5}, 11, [5, 7, 9, 11]),  # MMEngine's own test
        ({"interval": 2, "save_begin": 1}, 11, [1, 3, 5, 7, 9, 11]),
        ({"interval": 2, "save_begin": 3}, 8, [3, 5, 7, 8]),
        ({}, 3, [3]),
    ],
)
def test_epochs_are_saved_at_the_interval_and_at_the_end(train, settings, epochs, saved):
    runner = train(epochs=epochs, **settings)
    assert kept_names(runner) == [f"epoch_{number}" for number in saved]
    assert progress(runner.saves) == [(number, number) for number in saved]


def test_iterations_are_saved_at_the_interval_and_at_the_end(train):
    runner = train(epochs=3, epoch_length=4, interval=5, by_epoch=False)
    assert kept_names(runner) == ["iter_5", "iter_10", "iter_12"]
    assert progress(runner.saves) == [(1, 5), (2, 10), (2, 12)]


def test_the_newest_are_kept(train):
    assert kept_names(train(epochs=15, interval=5, max_keep_ckpts=2)) == ["epoch_10", "epoch_15"]
    runner = train(epochs=20, interval=5, max_keep_ckpts=2)
    assert kept_names(runner) == ["epoch_15", "epoch_20"]
    assert runner.message_hub.get_info("keep_ckpt_ids") == [15, 20]
    assert runner.message_hub.get_info("last_ckpt") == os.path.join(runner.work_dir, "epoch_20")


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        (1, ["epoch_3", "epoch_8"]),
        (2, ["epoch_2", "epoch_3", "epoch_8"]),
        (5, ["epoch_1", "epoch_2", "epoch_3", "epoch_4", "epoch_5", "epoch_8"]),  # checked from epoch_6 on
        (-1, [f"epoch_{number}" for number in range(1, 9)]),
    ],
)
def test_checkpoints_that_are_not_finite_remove_only_each_other(train, keep, names, caplog):
    runner = train(epochs=8, nan_from=4, interval=1, max_keep_ckpts=keep)
    assert kept_names(runner) == names
    warning = "epoch_8 has parameters that are not finite: earlier checkpoints are kept"
    assert (warning in caplog.messages) == (keep != -1)


def test_a_resumed_run_keeps_the_last_finite_checkpoint(train, make):
    saved = train(epochs=4, nan_from=3, interval=1, max_keep_ckpts=1)
    assert kept_names(saved) == ["epoch_2", "epoch_4"]
    state = saved.saves[-1]["hooks"]["CheckpointHook"]
    assert state["kept"] == [2, 4]
    assert state["reasons"] == {"epoch_2": "later parameters are not finite", "epoch_4": "the latest"}

    hook = CheckpointHook(interval=1, max_keep_ckpts=1)
    hook.load_state_dict(state)
    resumed = make(hook, existing=["epoch_2", "epoch_4"], epochs=6, epoch_length=1, done=4)
    resumed.nan_from = 0
    resumed.train()
    assert kept_names(resumed) == ["epoch_2", "epoch_6"]


def test_once_the_parameters_are_finite_again_the_newest_are_kept(make):
    class Recover(Hook):
        def before_train_epoch(self, runner):
            runner.nan_from = math.inf if runner.epoch >= 4 else runner.nan_from

    runner = make(CheckpointHook(interval=1, max_keep_ckpts=1), epochs=6, epoch_length=1)
    runner.register_hook(Recover())
    runner.nan_from = 2
    runner.train()
    assert kept_names(runner) == ["epoch_6"]


def test_a_best_checkpoint_is_not_replaced_by_one_that_is_not_finite(train, caplog):
    settings = dict(epochs=4, save_best="acc", save_last=False)
    runner = train(scores=[0.5, 0.6, 0.7, 0.8], nan_from=3, **settings)
    assert kept_names(runner) == ["best_acc_epoch_2"]
    assert runner.message_hub.get_info("best_score") == 0.6
    assert "best_acc_epoch_3 is not saved: its parameters are not finite" in caplog.text


def test_a_resumed_run_prunes_to_a_smaller_number(make):
    hook = CheckpointHook(interval=5, max_keep_ckpts=2)
    hook.load_state_dict({"kept": [5, 10, 15], "last": "epoch_15", "best": {}, "evicting": []})
    runner = make(hook, existing=["epoch_5", "epoch_10", "epoch_15"], epochs=15, done=15)
    runner.train()
    assert kept_names(runner) == ["epoch_10", "epoch_15"]
    assert runner.message_hub.get_info("keep_ckpt_ids") == [10, 15]


def test_multiples_of_keep_period_are_kept_in_addition_to_the_newest(train):
    runner = train(epochs=12, interval=1, max_keep_ckpts=2, keep_period=5)
    assert kept_names(runner) == ["epoch_5", "epoch_10", "epoch_11", "epoch_12"]
    assert runner.message_hub.get_info("keep_ckpt_ids") == [5, 10, 11, 12]
    assert runner.hook.state_dict()["reasons"] == {
        "epoch_5": "every 5 epochs",
        "epoch_10": "every 5 epochs",
        "epoch_11": "one of the latest 2",
        "epoch_12": "the latest",
    }
    runner = train(epochs=3, epoch_length=4, interval=2, by_epoch=False, max_keep_ckpts=1, keep_period=4)
    assert kept_names(runner) == ["iter_4", "iter_8", "iter_12"]


def test_a_resumed_run_with_a_larger_keep_period_removes_surplus_checkpoints(make):
    hook = CheckpointHook(interval=1, max_keep_ckpts=1, keep_period=10, save_best="acc", keep_best=1)
    best = [{"score": 0.9, "name": "best_acc_epoch_6"}, {"score": 0.8, "name": "best_acc_epoch_3"}]
    hook.load_state_dict({"kept": [5, 10, 11], "last": "epoch_11", "best": {"acc": best}, "evicting": []})
    existing = ("epoch_5", "epoch_10", "epoch_11", "best_acc_epoch_6", "best_acc_epoch_3")
    runner = make(hook, existing=existing, epochs=11, done=11)
    runner.train()
    assert kept_names(runner) == ["epoch_10", "epoch_11", "best_acc_epoch_6"]


def test_a_run_killed_before_removing_a_checkpoint_removes_it_when_resumed(train, make):
    runner = train(epochs=3, interval=1, max_keep_ckpts=2)
    state = runner.saves[-1]["hooks"]["CheckpointHook"]  # as saved in epoch_3: epoch_1 is about to be removed
    hook = CheckpointHook(interval=1, max_keep_ckpts=2)
    hook.load_state_dict(state)
    resumed = make(hook, existing=["epoch_1", "epoch_2", "epoch_3"], epochs=3, epoch_length=1, done=3)
    resumed.train()
    assert kept_names(resumed) == ["epoch_2", "epoch_3"]


def test_the_last_iteration_is_saved_when_training_ends_early(train):
    assert kept_names(train(epochs=20, stop_after=3)) == ["epoch_3"]
    assert kept_names(train(epochs=20, stop_after=3, save_last=False)) == []
    assert kept_names(train(epochs=20, epoch_length=4, stop_after=10, interval=1)) == ["epoch_1", "epoch_2", "iter_10"]
    assert kept_names(train(epochs=20, epoch_length=4, stop_after=8, interval=1)) == ["epoch_1", "epoch_2"]
    runner = train(epochs=20, epoch_length=4, stop_after=6, interval=5, by_epoch=False)
    assert kept_names(runner) == ["iter_5", "iter_6"]
    assert progress(runner.saves)[-1] == (1, 6)


def test_a_resumed_run_with_nothing_left_to_train_saves_nothing(make):
    runner = make(CheckpointHook(interval=1), epochs=2, done=2)
    runner.train()
    assert runner.saves == []


def test_the_directory_is_named_after_the_work_dir(make, tmp_path):
    runner = make(CheckpointHook(interval=1, out_dir=tmp_path / "a"), epochs=1)
    runner.train()
    assert runner.checkpointer.paths == [str(tmp_path / "a" / "exp" / "epoch_1")]


def test_names_follow_the_template(train):
    runner = train(epochs=2, interval=1, filename_tmpl="x_{}", scores=[0.1], save_best="acc")
    assert kept_names(runner) == ["x_1", "best_acc_x_1", "x_2"]


def test_options_of_saving_are_passed_on(train):
    runner = train(epochs=1, interval=1, save_optimizer=False, save_param_scheduler=False)
    assert not {"opt_state", "optimizer", "param_schedulers"} & {*runner.saves[0], *runner.saves[0]["state"]}


# --- Best checkpoints. ---


def test_the_best_is_kept_in_addition_to_the_newest(train):
    runner = train(epochs=4, interval=1, max_keep_ckpts=2, scores=[0.1, 0.5, 0.3, 0.6], save_best="auto")
    assert sorted(kept_names(runner)) == ["best_acc_epoch_4", "epoch_3", "epoch_4"]
    assert runner.checkpointer.pointer == os.path.join(runner.work_dir, "epoch_4")
    assert runner.message_hub.get_info("best_score") == 0.6
    assert runner.message_hub.get_info("best_ckpt") == os.path.join(runner.work_dir, "best_acc_epoch_4")


def test_a_new_best_writes_no_additional_regular_checkpoint(train):
    # MMEngine would leave epoch_6 and epoch_7 here: it saves epoch_6 off the interval, which pushes epoch_4 out.
    scores = [0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 0.6]
    runner = train(epochs=7, interval=4, max_keep_ckpts=2, scores=scores, save_best="acc")
    assert sorted(kept_names(runner)) == ["best_acc_epoch_6", "epoch_4", "epoch_7"]


def test_an_equal_score_a_nan_and_a_none_do_not_replace_the_best(train):
    runner = train(epochs=5, scores=[0.5, 0.5, float("nan"), None, 0.4], save_best="acc", save_last=False)
    assert kept_names(runner) == ["best_acc_epoch_1"]


def test_several_best_checkpoints_are_kept_if_requested(train, caplog):
    scores = [0.5, 0.9, 0.7, 0.7, 0.4, float("nan"), 0.8]
    with caplog.at_level("INFO"):
        runner = train(epochs=7, scores=scores, save_best="acc", keep_best=2, save_last=False)
    assert runner.checkpointer.saved == [
        f"best_acc_epoch_{epoch}" for epoch in (1, 2, 3, 7)
    ]  # the second 0.7 only equals the first
    assert sorted(kept_names(runner)) == ["best_acc_epoch_2", "best_acc_epoch_7"]
    assert runner.message_hub.get_info("best_ckpt") == os.path.join(runner.work_dir, "best_acc_epoch_2")
    assert runner.hook.state_dict()["reasons"] == {
        "best_acc_epoch_2": "best by acc (0.9000)",
        "best_acc_epoch_7": "number 2 by acc (0.8000)",
    }
    assert "Checkpoint number 2 of the best with 0.8000 acc at 7 epoch" in caplog.text


def test_less_is_better_under_the_rule_less(train):
    assert kept_names(train(epochs=3, scores=[3.0, 1.0, 2.0], key="loss", save_best="loss"))[0] == "best_loss_epoch_2"
    runner = train(epochs=3, scores=[3.0, 1.0, 2.0], key="FID", save_best="FID", rule="less")
    assert kept_names(runner)[0] == "best_FID_epoch_2"


def test_each_of_several_metrics_has_its_own_best(make):
    hook = CheckpointHook(save_best=["FID", "IS"], rule=["less", "greater"], save_last=False)
    scores = ((9.0, 2.0), (7.0, 1.0), (8.0, 3.0))
    runner = make(hook, [{"FID": fid, "IS": inception} for fid, inception in scores], epochs=3)
    runner.train()
    assert sorted(kept_names(runner)) == ["best_FID_epoch_2", "best_IS_epoch_3"]
    assert runner.message_hub.get_info("best_score_FID") == 7.0
    assert runner.message_hub.get_info("best_ckpt_IS") == os.path.join(runner.work_dir, "best_IS_epoch_3")


def test_a_slash_in_a_metric_does_not_make_a_directory(train):
    runner = train(epochs=1, scores=[0.5], key="coco/bbox_mAP", save_best="auto")
    assert "best_coco_bbox_mAP_epoch_1" in kept_names(runner)


def test_a_best_is_numbered_by_iterations_if_the_hook_or_the_loop_counts_them(train, make):
    runner = train(epochs=1, epoch_length=4, scores=[0.5], save_best="acc", by_epoch=False)
    assert "best_acc_iter_4" in kept_names(runner)
    hook = CheckpointHook(interval=1, save_best="acc", save_last=False)
    runner = make(hook, [{"acc": 0.1}, {"acc": 0.2}], by_epoch=False, epochs=2, epoch_length=1)
    runner.train()
    assert runner.checkpointer.saved == ["best_acc_iter_1", "best_acc_iter_2", "epoch_1"]


def test_the_best_score_survives_a_restart(train, make):
    first = train(epochs=2, interval=1, scores=[0.2, 0.8], save_best="auto")
    hook = CheckpointHook(interval=1, save_best="auto")
    hook.load_state_dict(first.hook.state_dict())
    runner = make(
        hook,
        [{"acc": None}, {"acc": 0.5}, {"acc": 0.9}],
        existing=["best_acc_epoch_2"],
        epochs=4,
        epoch_length=1,
        done=2,
    )
    runner.train()
    assert [name for name in kept_names(runner) if name.startswith("best")] == ["best_acc_epoch_4"]
    assert runner.message_hub.get_info("best_score") == 0.9


def test_auto_keeps_its_metric_after_a_restart(make):
    hook = CheckpointHook(save_best="auto", rule="less", save_last=False)
    hook.load_state_dict({"kept": [], "last": None, "best": {"err": [{"score": 2.0, "name": "x"}]}, "evicting": []})
    runner = make(hook, [{"other": 0.0, "err": 3.0}], epochs=1)
    runner.train()
    assert runner.saves == []


def test_a_validation_outside_training_saves_nothing(make):
    runner = make(CheckpointHook(interval=1, save_best="auto"), [{"acc": 1.0}])
    runner.val_loop.run()
    assert runner.saves == []


def test_a_validation_without_metrics_is_reported(make, caplog):
    runner = make(CheckpointHook(save_best="auto"), [{}], epochs=1)
    runner.train()
    assert runner.checkpointer.saved == ["epoch_1"]  # no best
    assert "returned no metrics" in caplog.text


# --- Settings and messages. ---


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"interval": 0}, ValueError, ["interval`", "at least 1", "got 0"]),
        ({"interval": -2}, ValueError, ["got -2"]),
        ({"interval": 1.5}, TypeError, ["interval`", "at least 1", "got 1.5"]),
        (
            {"interval": True},
            TypeError,
            ["interval`", "at least 1", "got True"],
        ),
        ({"by_epoch": "yes"}, TypeError, ["by_epoch`", "True or False", "got 'yes'"]),
        ({"max_keep_ckpts": 0}, ValueError, ["max_keep_ckpts`", "at least 1", "got 0"]),
        ({"save_begin": -1}, ValueError, ["save_begin`", "at least 0", "got -1"]),
        (
            {"max_keep_ckpts": 2, "keep_period": 0},
            ValueError,
            ["keep_period`", "at least 1", "got 0"],
        ),
        ({"keep_period": 5}, ValueError, ["keep_period", "max_keep_ckpts"]),
        ({"save_best": "acc", "keep_best": -1}, ValueError, ["keep_best`", "at least 1", "got -1"]),
        ({"keep_best": 2}, ValueError, ["keep_best", "save_best"]),
        ({"filename_tmpl": "epoch"}, ValueError, ["'epoch_{}'"]),
        ({"filename_tmpl": "a/{}"}, ValueError, ["file name"]),
        ({"filename_tmpl": "é" * 90 + "{}"}, ValueError, ["180"]),
        ({"filename_tmpl": "{}.incoming"}, ValueError, [".incoming", ".outgoing"]),
        ({"save_best": ["acc", "acc"]}, AssertionError, ["different metrics"]),
        ({"save_best": ["auto", "acc"]}, AssertionError, ["'auto'"]),
        ({"save_best": 3}, TypeError, ["save_best`", "None", "got 3"]),
        ({"save_best": "val_score"}, ValueError, ["'val_score'"]),
        ({"save_best": "acc", "rule": "greter"}, ValueError, ["rule`", "'greater'", "'less'"]),
        ({"save_best": ["a", "b", "c"], "rule": ["less", "less"]}, ValueError, ["3 metrics"]),
        ({"backend_args": {"backend": "s3"}}, ValueError, ["out_dir`", "'s3://...'", "'s3'"]),
        (
            {"out_dir": "a", "file_client_args": {"backend": "lmdb"}},
            ValueError,
            ["'local'", "'s3'", "'http'", "got 'lmdb'"],
        ),
        ({"out_dir": "ftp://bucket"}, ValueError, ["URL", "got 'ftp://bucket'"]),
    ],
)
def test_an_invalid_argument_is_refused_at_construction(settings, error, words):
    check_refusal(lambda: CheckpointHook(**settings), error, *words)


def test_inference_lists_can_be_given(train):
    runner = train(epochs=2, scores=[1.0, 2.0], key="val_score", save_best="auto", less_keys="score")
    assert kept_names(runner)[0] == "best_val_score_epoch_1"


def test_each_save_is_logged(train, caplog):
    with caplog.at_level("INFO"):
        first = train(epochs=2, interval=2, scores=[0.1, 0.2], save_best="acc")
        train(epochs=1, interval=1, by_epoch=False)
    exp = first.work_dir
    assert first.checkpointer.saved == ["best_acc_epoch_1", "epoch_2", "best_acc_epoch_2"]
    assert [
        text for text in caplog.messages if text.startswith(("Checkpoints", "Saving", "The best", "The previous"))
    ] == [
        f"Checkpoints will be saved to {exp}.",
        "The best checkpoint with 0.1000 acc at 1 epoch is saved to best_acc_epoch_1.",
        "Saving checkpoint at 2 epochs",
        f"The previous best checkpoint {exp}/best_acc_epoch_1 is removed",
        "The best checkpoint with 0.2000 acc at 2 epoch is saved to best_acc_epoch_2.",
        f"Checkpoints will be saved to {exp}.",
        "Saving checkpoint at 1 iterations",
    ]
    shown = [record.__dict__.get("on_terminal", "") for record in caplog.records]  # MMEngine's words are for the log file
    assert [text for text in shown if text.startswith(("Saving", "The best"))] == [
        "The best checkpoint with 0.1000 acc at epoch 1 is saved to best_acc_epoch_1.",
        "Saving checkpoint at epoch 2",
        "The best checkpoint with 0.2000 acc at epoch 2 is saved to best_acc_epoch_2.",
        "Saving checkpoint at iteration 1",
    ]


def test_an_epoch_interval_in_an_iteration_loop_logs_a_warning(make, caplog):
    runner = make(CheckpointHook(interval=1), by_epoch=False, epochs=1)
    runner.train()
    assert runner.checkpointer.saved == ["epoch_1"]
    assert "set by_epoch=False" in caplog.text


# --- With files. ---


def test_the_files_on_disk_are_those_to_keep(make, tmp_path):
    hook = HOOKS.build(
        {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 1, "save_best": "acc", "published_keys": "params"}
    )
    runner = make(hook, [{"acc": 0.5}, {"acc": 0.4}], on_disk=True, epochs=2, epoch_length=2)
    runner.train()
    directory = tmp_path / "exp"
    regular, published, best = [], [], []
    for name in {*os.listdir(directory)} - {runner.timestamp}:  # the logs
        (published if "-" in name else best if name.startswith("best") else regular).append(name)
    assert sorted(regular) == ["config.py", "current_run", "epoch_2", "last_checkpoint"]
    assert best == ["best_acc_epoch_1"]
    assert sorted(name.split("-")[0] for name in published) == ["best_acc_epoch_1", "epoch_2"]
    assert (directory / "last_checkpoint").read_text() == "epoch_2"
    assert list(load(directory / "best_acc_epoch_1").params["w"]) == [2, 2]
    saved = read_meta(directory / "epoch_2")["hooks"]["CheckpointHook"]
    assert saved["best"] == {"acc": [{"score": 0.5, "name": "best_acc_epoch_1"}]}
    assert saved["reasons"] == {"epoch_2": "the latest", "best_acc_epoch_1": "best by acc (0.5000)"}
    assert (saved["kept"], saved["evicting"]) == ([2], ["epoch_1"])
