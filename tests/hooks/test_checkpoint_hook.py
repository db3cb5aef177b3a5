import logging
import math
import os
import types

import jax.numpy as jnp
import pytest

from jengine.checkpoint import Checkpointer, load, read_meta
from jengine.hooks import CheckpointHook
from jengine.logging import AsyncWriter, PhaseTimer
from jengine.registry import HOOKS


class FakeCheckpointer:
    """Keep a list of paths instead of directories."""

    def __init__(self, work_dir):
        self.paths = []

    def save(self, path, state, meta, *, latest, evict, checksums):
        evict = [os.path.join(os.path.dirname(path), name) for name in evict]
        self.paths = [old for old in self.paths if old not in (path, *evict)] + [path]
        self.pointer = path if latest else getattr(self, "pointer", None)

    def evict(self, directory, names):
        self.paths = [old for old in self.paths if old not in [os.path.join(directory, name) for name in names]]

    def wait(self):
        pass


class FakeHub(dict):
    update_info = dict.__setitem__
    get_info = dict.get


class FakeRunner:
    """Count epochs and iterations, and call a hook at the same points as the Runner."""

    def __init__(self, work_dir, hook, max_epochs=20, epoch_length=4, writer=FakeCheckpointer, by_epoch=True):
        self.work_dir = str(work_dir)
        self.hook = hook
        self.max_epochs, self.max_iters = max_epochs, max_epochs * epoch_length
        self.epoch_length = epoch_length
        self.epoch = self.iter = 0
        self.nan_from = math.inf  # iterations after which the parameters are NaN
        self.train_loop = types.SimpleNamespace(by_epoch=by_epoch)
        self.checkpointer = writer(work_dir)
        self.message_hub = FakeHub()
        self.logger = logging.getLogger("test_checkpoint_hook")
        self.log_writer = AsyncWriter()
        self.phase_timer = PhaseTimer()
        self.saves = []

    @property
    def state(self):
        bad = self.iter >= self.nan_from
        return types.SimpleNamespace(
            params={"kernel": jnp.array([1.0, jnp.nan if bad else 1.0]), "count": jnp.ones(2, int)}
        )

    def save_checkpoint(
        self, *, out_dir, filename, save_optimizer, save_param_scheduler, meta, by_epoch, evict, latest, checksums
    ):
        state = {"params": {"kernel": jnp.full(2, self.iter)}, "model_state": {}}
        bundle = {"meta": meta, "hooks": {"CheckpointHook": self.hook.state_dict()}}
        self.saves.append({"name": filename, "optimizer": save_optimizer, "scheduler": save_param_scheduler, **bundle})
        self.checkpointer.save(
            os.path.join(out_dir, filename), state, bundle, latest=latest, evict=evict, checksums=checksums
        )

    def train(self, scores=(), key="acc", stop_after=None):
        """Train to `max_epochs`, with one validation score for each epoch, or stop early after `stop_after` iterations."""
        self.hook.before_train(self)
        while self.epoch < self.max_epochs:
            for batch_idx in range(self.epoch_length):
                self.hook.after_train_iter(self, batch_idx)
                self.iter += 1
                if self.iter == stop_after and batch_idx + 1 < self.epoch_length:
                    return self.hook.after_train(self)
            self.hook.after_train_epoch(self)
            self.epoch += 1
            if self.epoch <= len(scores):
                self.hook.after_val_epoch(self, {key: scores[self.epoch - 1]})
            if self.iter == stop_after:
                break
        return self.hook.after_train(self)

    @property
    def names(self):
        return [os.path.basename(path) for path in self.checkpointer.paths]


def train(*, max_epochs, epoch_length=1, scores=(), key="acc", stop_after=None, nan_from=math.inf, **settings):
    runner = FakeRunner("/w/exp", CheckpointHook(**settings), max_epochs, epoch_length)
    runner.nan_from = nan_from
    runner.train(scores, key, stop_after)
    return runner


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
def test_epochs_are_saved_at_the_interval_and_at_the_end(settings, epochs, saved):
    runner = train(max_epochs=epochs, **settings)
    assert runner.names == [f"epoch_{number}" for number in saved]
    assert [save["meta"] for save in runner.saves] == [{"epoch": number, "iter": number} for number in saved]


def test_iterations_are_saved_at_the_interval_and_at_the_end():
    runner = train(max_epochs=3, epoch_length=4, interval=5, by_epoch=False)
    assert runner.names == ["iter_5", "iter_10", "iter_12"]
    assert [save["meta"] for save in runner.saves] == [
        {"epoch": 1, "iter": 5},
        {"epoch": 2, "iter": 10},
        {"epoch": 2, "iter": 12},
    ]


def test_the_newest_are_kept():
    assert train(max_epochs=15, interval=5, max_keep_ckpts=2).names == ["epoch_10", "epoch_15"]
    runner = train(max_epochs=20, interval=5, max_keep_ckpts=2)
    assert runner.names == ["epoch_15", "epoch_20"]
    assert runner.message_hub["keep_ckpt_ids"] == [15, 20]
    assert runner.message_hub["last_ckpt"] == "/w/exp/epoch_20"


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        (1, ["epoch_3", "epoch_8"]),
        (2, ["epoch_2", "epoch_3", "epoch_8"]),
        (5, ["epoch_1", "epoch_2", "epoch_3", "epoch_4", "epoch_5", "epoch_8"]),  # checked from epoch_6 on
        (-1, [f"epoch_{number}" for number in range(1, 9)]),
    ],
)
def test_checkpoints_that_are_not_finite_remove_only_each_other(keep, names, caplog):
    runner = train(max_epochs=8, nan_from=4, interval=1, max_keep_ckpts=keep)
    assert runner.names == names
    warning = "epoch_8 has parameters that are not finite: earlier checkpoints are kept"
    assert (warning in caplog.messages) == (keep != -1)


def test_a_resumed_run_keeps_the_last_finite_checkpoint():
    saved = train(max_epochs=4, nan_from=3, interval=1, max_keep_ckpts=1)
    assert saved.names == ["epoch_2", "epoch_4"]
    state = saved.saves[-1]["hooks"]["CheckpointHook"]
    assert state["kept"] == [2, 4]
    assert state["reasons"] == {"epoch_2": "later parameters are not finite", "epoch_4": "the latest"}

    hook = CheckpointHook(interval=1, max_keep_ckpts=1)
    hook.load_state_dict(state)
    resumed = FakeRunner("/w/exp", hook, max_epochs=6, epoch_length=1)
    resumed.checkpointer.paths = [f"/w/exp/epoch_{number}" for number in (2, 4)]
    resumed.epoch = resumed.iter = 4
    resumed.nan_from = 0
    resumed.train()
    assert resumed.names == ["epoch_2", "epoch_6"]


def test_once_the_parameters_are_finite_again_the_newest_are_kept():
    runner = FakeRunner("/w/exp", CheckpointHook(interval=1, max_keep_ckpts=1), 6, 1)
    runner.nan_from = 2
    after_epoch = runner.hook.after_train_epoch

    def recover(runner):
        runner.nan_from = math.inf if runner.epoch >= 4 else runner.nan_from
        after_epoch(runner)

    runner.hook.after_train_epoch = recover
    runner.train()
    assert runner.names == ["epoch_6"]


def test_a_best_checkpoint_is_not_replaced_by_one_that_is_not_finite(caplog):
    settings = dict(max_epochs=4, save_best="acc", save_last=False)
    runner = train(scores=[0.5, 0.6, 0.7, 0.8], nan_from=3, **settings)
    assert runner.names == ["best_acc_epoch_2"]
    assert runner.message_hub["best_score"] == 0.6
    assert "best_acc_epoch_3 is not saved: its parameters are not finite" in caplog.text


def test_a_resumed_run_prunes_to_a_smaller_number():
    hook = CheckpointHook(interval=5, max_keep_ckpts=2)
    hook.load_state_dict({"kept": [5, 10, 15], "last": "epoch_15", "best": {}, "evicting": []})
    runner = FakeRunner("/w/exp", hook)
    runner.checkpointer.paths = [f"/w/exp/epoch_{number}" for number in (5, 10, 15)]
    hook.before_train(runner)
    assert runner.names == ["epoch_10", "epoch_15"]
    assert runner.message_hub["keep_ckpt_ids"] == [10, 15]


def test_multiples_of_keep_every_are_kept_in_addition_to_the_newest():
    runner = train(max_epochs=12, interval=1, max_keep_ckpts=2, keep_every=5)
    assert runner.names == ["epoch_5", "epoch_10", "epoch_11", "epoch_12"]
    assert runner.message_hub["keep_ckpt_ids"] == [5, 10, 11, 12]
    assert runner.hook.state_dict()["reasons"] == {
        "epoch_5": "every 5 epochs",
        "epoch_10": "every 5 epochs",
        "epoch_11": "one of the latest 2",
        "epoch_12": "the latest",
    }
    runner = train(max_epochs=3, epoch_length=4, interval=2, by_epoch=False, max_keep_ckpts=1, keep_every=4)
    assert runner.names == ["iter_4", "iter_8", "iter_12"]


def test_a_resumed_run_with_a_larger_keep_every_removes_surplus_checkpoints():
    hook = CheckpointHook(interval=1, max_keep_ckpts=1, keep_every=10, save_best="acc", keep_best=1)
    best = [{"score": 0.9, "name": "best_acc_epoch_6"}, {"score": 0.8, "name": "best_acc_epoch_3"}]
    hook.load_state_dict({"kept": [5, 10, 11], "last": "epoch_11", "best": {"acc": best}, "evicting": []})
    runner = FakeRunner("/w/exp", hook)
    names = ("epoch_5", "epoch_10", "epoch_11", "best_acc_epoch_6", "best_acc_epoch_3")
    runner.checkpointer.paths = [f"/w/exp/{name}" for name in names]
    hook.before_train(runner)
    assert runner.names == ["epoch_10", "epoch_11", "best_acc_epoch_6"]


def test_a_run_killed_before_removing_a_checkpoint_removes_it_when_resumed():
    runner = train(max_epochs=3, interval=1, max_keep_ckpts=2)
    state = runner.saves[-1]["hooks"]["CheckpointHook"]  # as saved in epoch_3: epoch_1 is about to be removed
    hook = CheckpointHook(interval=1, max_keep_ckpts=2)
    hook.load_state_dict(state)
    resumed = FakeRunner("/w/exp", hook, max_epochs=3, epoch_length=1)
    resumed.checkpointer.paths = [f"/w/exp/epoch_{number}" for number in (1, 2, 3)]
    resumed.epoch = resumed.iter = 3
    resumed.train()
    assert resumed.names == ["epoch_2", "epoch_3"]


def test_the_last_iteration_is_saved_when_training_ends_early():
    assert train(max_epochs=20, stop_after=3).names == ["epoch_3"]
    assert train(max_epochs=20, stop_after=3, save_last=False).names == []
    assert train(max_epochs=20, epoch_length=4, stop_after=10, interval=1).names == ["epoch_1", "epoch_2", "iter_10"]
    assert train(max_epochs=20, epoch_length=4, stop_after=8, interval=1).names == ["epoch_1", "epoch_2"]
    runner = train(max_epochs=20, epoch_length=4, stop_after=6, interval=5, by_epoch=False)
    assert runner.names == ["iter_5", "iter_6"]
    assert runner.saves[-1]["meta"] == {"epoch": 1, "iter": 6}


def test_a_resumed_run_with_nothing_left_to_train_saves_nothing():
    runner = FakeRunner("/w/exp", CheckpointHook(interval=1), max_epochs=2)
    runner.epoch, runner.iter = 2, 8
    runner.train()
    assert runner.saves == []


def test_the_directory_is_named_after_the_work_dir():
    runner = FakeRunner("/w/exp/", CheckpointHook(interval=1, out_dir="/a"), max_epochs=1)
    runner.train()
    assert runner.checkpointer.paths == ["/a/exp/epoch_1"]


def test_names_follow_the_template():
    runner = train(max_epochs=2, interval=1, filename_tmpl="x_{}", scores=[0.1], save_best="acc")
    assert runner.names == ["x_1", "best_acc_x_1", "x_2"]


def test_options_of_saving_are_passed_on():
    runner = train(max_epochs=1, interval=1, save_optimizer=False, save_param_scheduler=False)
    assert (runner.saves[0]["optimizer"], runner.saves[0]["scheduler"]) == (False, False)


# --- Best checkpoints. ---


def test_the_best_is_kept_in_addition_to_the_newest():
    runner = train(max_epochs=4, interval=1, max_keep_ckpts=2, scores=[0.1, 0.5, 0.3, 0.6], save_best="auto")
    assert sorted(runner.names) == ["best_acc_epoch_4", "epoch_3", "epoch_4"]
    assert runner.checkpointer.pointer == "/w/exp/epoch_4"
    assert runner.message_hub["best_score"] == 0.6
    assert runner.message_hub["best_ckpt"] == "/w/exp/best_acc_epoch_4"


def test_a_new_best_writes_no_additional_regular_checkpoint():
    # MMEngine would leave epoch_6 and epoch_7 here: it saves epoch_6 off the interval, which pushes epoch_4 out.
    scores = [0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 0.6]
    runner = train(max_epochs=7, interval=4, max_keep_ckpts=2, scores=scores, save_best="acc")
    assert sorted(runner.names) == ["best_acc_epoch_6", "epoch_4", "epoch_7"]


def test_an_equal_score_a_nan_and_a_none_do_not_replace_the_best():
    runner = train(max_epochs=5, scores=[0.5, 0.5, float("nan"), None, 0.4], save_best="acc", save_last=False)
    assert runner.names == ["best_acc_epoch_1"]


def test_several_best_checkpoints_are_kept_if_requested(caplog):
    scores = [0.5, 0.9, 0.7, 0.7, 0.4, float("nan"), 0.8]
    with caplog.at_level("INFO"):
        runner = train(max_epochs=7, scores=scores, save_best="acc", keep_best=2, save_last=False)
    saved = [save["name"] for save in runner.saves]
    assert saved == [f"best_acc_epoch_{epoch}" for epoch in (1, 2, 3, 7)]  # the second 0.7 only equals the first
    assert sorted(runner.names) == ["best_acc_epoch_2", "best_acc_epoch_7"]
    assert runner.message_hub["best_ckpt"] == "/w/exp/best_acc_epoch_2"
    assert runner.hook.state_dict()["reasons"] == {
        "best_acc_epoch_2": "best by acc (0.9000)",
        "best_acc_epoch_7": "number 2 by acc (0.8000)",
    }
    assert "Checkpoint number 2 of the best with 0.8000 acc at 7 epoch" in caplog.text


def test_less_is_better_under_the_rule_less():
    assert train(max_epochs=3, scores=[3.0, 1.0, 2.0], key="loss", save_best="loss").names[0] == "best_loss_epoch_2"
    runner = train(max_epochs=3, scores=[3.0, 1.0, 2.0], key="FID", save_best="FID", rule="less")
    assert runner.names[0] == "best_FID_epoch_2"


def test_each_of_several_metrics_has_its_own_best():
    hook = CheckpointHook(save_best=["FID", "IS"], rule=["less", "greater"])
    runner = FakeRunner("/w/exp", hook)
    hook.before_train(runner)
    for runner.epoch, fid, inception in ((1, 9.0, 2.0), (2, 7.0, 1.0), (3, 8.0, 3.0)):
        hook.after_val_epoch(runner, {"FID": fid, "IS": inception})
    assert sorted(runner.names) == ["best_FID_epoch_2", "best_IS_epoch_3"]
    assert runner.message_hub["best_score_FID"] == 7.0
    assert runner.message_hub["best_ckpt_IS"] == "/w/exp/best_IS_epoch_3"


def test_a_slash_in_a_metric_does_not_make_a_directory():
    runner = train(max_epochs=1, scores=[0.5], key="coco/bbox_mAP", save_best="auto")
    assert "best_coco_bbox_mAP_epoch_1" in runner.names


def test_a_best_is_numbered_by_iterations_if_the_hook_or_the_loop_counts_them():
    runner = train(max_epochs=1, epoch_length=4, scores=[0.5], save_best="acc", by_epoch=False)
    assert "best_acc_iter_4" in runner.names
    hook = CheckpointHook(interval=1, save_best="acc")
    runner = FakeRunner("/w/exp", hook, by_epoch=False)
    hook.before_train(runner)
    for runner.iter, score in ((50, 0.1), (100, 0.2)):
        hook.after_val_epoch(runner, {"acc": score})
    assert runner.names == ["best_acc_iter_100"]


def test_the_best_score_survives_a_restart():
    first = train(max_epochs=2, interval=1, scores=[0.2, 0.8], save_best="auto")
    hook = CheckpointHook(interval=1, save_best="auto")
    hook.load_state_dict(first.hook.state_dict())
    runner = FakeRunner("/w/exp", hook, max_epochs=4, epoch_length=1)
    runner.epoch = runner.iter = 2
    runner.train(scores=[None, None, 0.5, 0.9])
    assert [name for name in runner.names if name.startswith("best")] == ["best_acc_epoch_4"]
    assert runner.message_hub["best_score"] == 0.9


def test_auto_keeps_its_metric_after_a_restart():
    hook = CheckpointHook(save_best="auto", rule="less")
    hook.load_state_dict({"kept": [], "last": None, "best": {"err": [{"score": 2.0, "name": "x"}]}, "evicting": []})
    runner = FakeRunner("/w/exp", hook)
    hook.before_train(runner)
    hook.after_val_epoch(runner, {"other": 0.0, "err": 3.0})
    assert runner.saves == []


def test_a_validation_outside_training_saves_nothing():
    runner = FakeRunner("/w/exp", CheckpointHook(interval=1, save_best="auto"))
    runner.hook.after_val_epoch(runner, {"acc": 1.0})
    assert runner.saves == []


def test_a_validation_without_metrics_is_reported(caplog):
    runner = FakeRunner("/w/exp", CheckpointHook(save_best="auto"))
    runner.hook.before_train(runner)
    runner.hook.after_val_epoch(runner, {})
    assert "returned no metrics" in caplog.text


def test_an_unknown_metric_is_an_error_that_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"no metric 'top-1'.*returned: acc"):
        train(max_epochs=1, scores=[0.5], save_best="top-1")
    with pytest.raises(ValueError, match="cannot infer from the name 'perplexity' whether .*; pass rule='greater'"):
        train(max_epochs=1, scores=[0.5], key="perplexity", save_best="auto")


# --- Settings and messages. ---


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"interval": 0}, ValueError, "interval` must be -1 or an integer of at least 1, got 0"),
        ({"interval": -2}, ValueError, "got -2"),
        ({"interval": 1.5}, TypeError, "interval` must be -1 or an integer of at least 1, got 1.5"),
        ({"interval": True}, TypeError, "interval` must be -1 or an integer of at least 1, got True"),
        ({"by_epoch": "yes"}, TypeError, "by_epoch` must be True or False, got 'yes'"),
        ({"max_keep_ckpts": 0}, ValueError, "max_keep_ckpts` must be -1 or an integer of at least 1, got 0"),
        ({"save_begin": -1}, ValueError, "save_begin` must be an integer of at least 0, got -1"),
        (
            {"max_keep_ckpts": 2, "keep_every": 0},
            ValueError,
            "keep_every` must be -1 or an integer of at least 1, got 0",
        ),
        ({"keep_every": 5}, ValueError, "keep_every needs a positive max_keep_ckpts"),
        ({"save_best": "acc", "keep_best": -1}, ValueError, "keep_best` must be an integer of at least 1, got -1"),
        ({"keep_best": 2}, ValueError, "keep_best needs save_best"),
        ({"filename_tmpl": "epoch"}, ValueError, "one {} for the number, like 'epoch_{}', got 'epoch'"),
        ({"filename_tmpl": "a/{}"}, ValueError, "file name"),
        ({"filename_tmpl": "{}.incoming"}, ValueError, "filename_tmpl must not end in '.incoming' or '.outgoing'"),
        ({"save_best": ["acc", "acc"]}, AssertionError, "must have different metrics"),
        ({"save_best": ["auto", "acc"]}, AssertionError, "must have 'auto' alone or metrics"),
        ({"save_best": 3}, TypeError, "save_best` must be a string or a list or None, got 3"),
        ({"save_best": "val_perplexity"}, ValueError, "cannot infer from the name 'val_perplexity'"),
        ({"save_best": "acc", "rule": "greter"}, KeyError, "did you mean 'greater'"),
        ({"save_best": ["a", "b", "c"], "rule": ["less", "less"]}, ValueError, "one for each of the 3 metrics"),
        ({"backend_args": {"backend": "s3"}}, ValueError, "storage backends are not supported"),
        ({"out_dir": "s3://bucket"}, ValueError, "mounted file system, got 's3://bucket'"),
    ],
)
def test_an_invalid_argument_is_refused_at_construction(settings, error, message):
    with pytest.raises(error, match=message):
        CheckpointHook(**settings)


def test_inference_lists_can_be_given():
    runner = train(max_epochs=2, scores=[1.0, 2.0], key="perplexity", save_best="auto", less_keys="perplexity")
    assert runner.names[0] == "best_perplexity_epoch_1"


def test_each_save_is_logged(caplog):
    with caplog.at_level("INFO"):
        train(max_epochs=2, interval=2, scores=[0.1, 0.2], save_best="acc")
        train(max_epochs=1, interval=1, by_epoch=False)
    assert caplog.messages == [
        "Checkpoints will be saved to /w/exp.",
        "The best checkpoint with 0.1000 acc at 1 epoch is saved to best_acc_epoch_1.",
        "Saving checkpoint at 2 epochs",
        "The previous best checkpoint /w/exp/best_acc_epoch_1 is removed",
        "The best checkpoint with 0.2000 acc at 2 epoch is saved to best_acc_epoch_2.",
        "Checkpoints will be saved to /w/exp.",
        "Saving checkpoint at 1 iterations",
    ]


def test_an_epoch_interval_in_an_iteration_loop_logs_a_warning(caplog):
    hook = CheckpointHook(interval=1)
    hook.before_train(FakeRunner("/w/exp", hook, by_epoch=False))
    assert "set by_epoch=False" in caplog.text


# --- With files. ---


def test_the_files_on_disk_are_those_to_keep(tmp_path):
    hook = HOOKS.build(
        {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 1, "save_best": "acc", "published_keys": "params"}
    )
    runner = FakeRunner(tmp_path, hook, max_epochs=2, epoch_length=2, writer=Checkpointer)
    runner.train([0.5, 0.4])
    runner.checkpointer.close()
    regular, published, best = [], [], []
    for name in os.listdir(tmp_path):
        (published if "-" in name else best if name.startswith("best") else regular).append(name)
    assert sorted(regular) == ["epoch_2", "last_checkpoint"]
    assert best == ["best_acc_epoch_1"]
    assert sorted(name.split("-")[0] for name in published) == ["best_acc_epoch_1", "epoch_2"]
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "epoch_2")
    assert list(load(tmp_path / "best_acc_epoch_1").params["kernel"]) == [2, 2]
    saved = read_meta(tmp_path / "epoch_2")["hooks"]["CheckpointHook"]
    assert saved["best"] == {"acc": [{"score": 0.5, "name": "best_acc_epoch_1"}]}
    assert saved["reasons"] == {"epoch_2": "the latest", "best_acc_epoch_1": "best by acc (0.5000)"}
    assert (saved["kept"], saved["evicting"]) == ([2], ["epoch_1"])
