"""Test followers, which evaluate the checkpoints of a run in processes of their own."""

import json
import math
import pathlib
import shutil
import time

import pytest

from jengine.checkpoint import find_best_checkpoint, list_best_checkpoints
from jengine.checkpoint.lock import make_lock
from jengine.checkpoint.start_from import LoadFrom
from jengine.cli import main
from jengine.config.storage import list_directory, storage_path
from jengine.extras.followers.scores import (
    Score,
    judge,
    read_scores,
    read_verdict,
    write_score,
    write_verdict,
)
from jengine.extras.optimizers.early_stopping import EarlyStoppingHook
from jengine.extras.report.run_files import read_runs
from jengine.hooks import CheckpointHook, Hook
from tests.refusals import check_refusal

CONFIG = str(pathlib.Path(__file__).parent / "followed_config.py")


def find_log_dir(work_dir):
    root = storage_path("work_dir", work_dir)
    (name,) = [name for name in list_directory(root) if name[:2] == "20"]
    return root / name


def follow(work_dir, *arguments):
    return main(["test", CONFIG, str(work_dir), "--follow", "0.01", *arguments])


def train(work_dir, *arguments):
    return main(["train", CONFIG, "--work-dir", str(work_dir), *arguments])


def names(scores):
    return [score.checkpoint for score in scores]


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A work dir whose three checkpoints have been evaluated after the training."""
    work_dir = tmp_path_factory.mktemp("followed") / "run"
    assert train(work_dir) == 0
    # although only one is to be kept, none was evaluated yet
    assert {"epoch_1", "epoch_2", "epoch_3"} <= {path.name for path in work_dir.iterdir()}
    assert follow(work_dir) == 0
    return work_dir


def test_a_follower_scores_each_checkpoint_as_the_run_itself_would(followed, tmp_path):
    assert train(tmp_path / "alone", "--config.val_cfg.follow=False") == 0
    lines = (find_log_dir(tmp_path / "alone") / "vis_data/scalars.json").read_text().splitlines()
    own = [(row["iter"], row["loss"]) for row in map(json.loads, lines) if row.get("mode") == "val"]
    scores = read_scores(find_log_dir(followed))
    assert names(scores) == ["epoch_1", "epoch_2", "epoch_3"]
    assert [(score.iter, score.metrics["loss"]) for score in scores] == own


def test_the_report_has_the_scores_under_their_iterations(followed):
    (run,) = read_runs([str(followed)]).values()
    iterations, losses = run.curves[0]["val", "loss"]
    assert iterations == [4, 8, 12]
    assert losses == [score.metrics["loss"] for score in read_scores(find_log_dir(followed))]


def test_the_best_checkpoint_is_that_of_the_followers(followed):
    assert find_best_checkpoint(followed) == str(followed / "epoch_3")
    (best,) = list_best_checkpoints(followed).values()
    assert best.score == read_scores(find_log_dir(followed))[-1].metrics["loss"]


def test_a_follower_that_is_started_again_evaluates_what_is_missing(followed, capsys):
    (find_log_dir(followed) / "evaluations/epoch_2/scores.json").unlink()
    assert follow(followed) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["epoch_2"]


def test_a_follower_leaves_to_another_one_what_that_evaluates(followed, capsys, monkeypatch):
    log_dir = find_log_dir(followed)
    for name in ("epoch_2", "epoch_3"):
        (log_dir / f"evaluations/{name}/scores.json").unlink()
    claim = make_lock(log_dir / "evaluations/epoch_2")
    claim.acquire()

    def release(seconds):  # called when there is nothing else to do
        assert names(read_scores(log_dir)) == ["epoch_1", "epoch_3"]
        claim.release()

    monkeypatch.setattr(time, "sleep", release)
    assert follow(followed) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["epoch_3", "epoch_2"]


def test_a_claim_of_a_killed_follower_is_free(followed, capsys):
    folder = find_log_dir(followed) / "evaluations/epoch_1"
    (folder / "scores.json").unlink()
    (folder / "run.lock").write_text('{"pid": 1}')
    assert follow(followed) == 0
    assert "\nepoch_1 (iteration 4): loss: " in capsys.readouterr().out


class FakeFollower(Hook):
    """Follower that gives the checkpoints of past epochs these losses, and records which are there."""

    priority = "VERY_HIGH"

    def __init__(self, losses, lag=0):
        self.losses, self.lag, self.there = losses, lag, []

    def after_train_epoch(self, runner):
        runner.checkpointer.wait()
        root = storage_path("work_dir", runner.work_dir)
        self.there.append(sorted(name for name in list_directory(root) if name.startswith("epoch")))
        epoch = runner.epoch - self.lag
        if epoch > 0:
            score = Score(f"epoch_{epoch}", "", epoch, epoch, "val", {"loss": self.losses[epoch - 1]})
            write_score(root / runner.timestamp, score)
            write_verdict(root / runner.timestamp, runner.hooks, range(1, epoch + 1))


@pytest.fixture
def make(make_runner, tmp_path):
    def make(*hooks, epochs=6, keep=1, **changes):
        return make_runner(
            work_dir=str(tmp_path / "run"),
            train_cfg=dict(max_epochs=epochs, epoch_length=1),
            default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=keep, save_best="loss")),
            validates=True,
            val_cfg=dict(type="FollowedValLoop", follow="elsewhere"),
            custom_hooks=list(hooks),
            **changes,
        )

    return make


def test_the_trainer_keeps_the_best_and_what_waits_and_logs_the_scores(make):
    follower = FakeFollower([5.0, 1.0, 3.0, 4.0, 2.0], lag=1)
    runner = make(follower)
    runner.train()
    # the verdict about an epoch comes two saves after it
    assert follower.there[4] == ["epoch_2", "epoch_3", "epoch_4"]
    assert follower.there[5] == ["epoch_2", "epoch_4", "epoch_5"]
    assert pathlib.Path(find_best_checkpoint(runner.work_dir)).name == "epoch_2"
    assert [(iteration, metrics) for _, iteration, metrics in runner.run.validations] == [
        (epoch, {"loss": loss}) for epoch, loss in enumerate([5.0, 1.0, 3.0, 4.0], 1)
    ]
    lines = pathlib.Path(runner.log_dir, "vis_data/scalars.json").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("mode") == "val"]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 5.0), (2, 1.0), (3, 3.0), (4, 4.0)]


def test_training_ends_at_the_save_after_the_verdict(make):
    stopping = EarlyStoppingHook("loss", min_delta=0.0, patience=2)
    received = []

    class Receiver(Hook):
        def monitored_metrics(self):
            return [("monitor", "loss", "less")]

        def take_score(self, runner, iteration, metrics):
            received.append((iteration, metrics["loss"]))

    runner = make(FakeFollower([1.0, 2.0, 3.0, 4.0, 5.0]), stopping, Receiver())
    runner.train()
    assert runner.epoch == 4  # epoch 3 was the second without improvement
    assert received == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_resumed_run_forgets_the_scores_of_what_it_trains_again(make, tmp_path):
    make(FakeFollower([4.0, 3.0, 2.0, 1.0]), epochs=5, keep=-1).train()
    log_dir = find_log_dir(tmp_path / "run")
    assert read_verdict(log_dir).best["loss"] == [{"score": 1.0, "name": "epoch_4"}]
    second = make(epochs=3, keep=-1, resume=str(tmp_path / "run/epoch_3"))
    second.train()
    assert names(read_scores(log_dir)) == ["epoch_1", "epoch_2", "epoch_3"]
    assert read_verdict(log_dir).best["loss"] == [{"score": 2.0, "name": "epoch_3"}]
    assert [iteration for _, iteration, _ in second.run.validations] == [1, 2, 3]


def test_a_gap_in_the_scores_does_not_end_training_and_a_nan_is_never_the_best():
    hooks = [CheckpointHook(save_best="auto", rule="less"), EarlyStoppingHook("loss", min_delta=0, patience=2)]
    losses = {1: 1.0, 2: 2.0, 4: 3.0}
    scores = [Score(f"epoch_{i}", "", i, i, "val", {"loss": loss}) for i, loss in losses.items()]
    assert judge(hooks, scores, [1, 2, 3, 4]).stop is None
    assert judge(hooks, scores, [1, 2, 4]).stop == "loss did not improve in the last 2 validations, the best was 1"
    gone = Score("epoch_3", "", 3, 3, "val", {}, gone=True)
    verdict = judge(hooks, [*scores[:2], gone, scores[2]], [1, 2, 3, 4])
    assert verdict.stop is not None
    assert verdict.done == ["epoch_1", "epoch_2", "epoch_3", "epoch_4"]
    nan = Score("epoch_1", "", 1, 1, "val", {"loss": math.nan})
    assert judge(hooks, [nan, scores[1]], []).best == {"loss": [{"score": 2.0, "name": "epoch_2"}]}


def test_a_hook_or_a_schedule_that_waits_for_validations_is_refused(make):
    class Waiting(Hook):
        def monitored_metrics(self):
            return [("monitor", "loss", "less")]

    plateau = dict(type="ReduceOnPlateauLR", monitor="loss", rule="less")
    for runner, words in (
        (make(Waiting()), "Waiting(monitor='loss')"),
        (make(param_scheduler=plateau), "a schedule that follows a metric, got 'loss'"),
    ):
        check_refusal(runner.train, ValueError, "must be left out", words)
        assert runner.iter == 0


def test_a_follower_of_a_run_that_validates_itself_tests(tmp_path, capsys):
    config = f"{CONFIG}:tested"
    assert main(["train", config, "--work-dir", str(tmp_path / "run"), "--config.train_cfg.max_epochs=2"]) == 0
    assert main(["test", config, str(tmp_path / "run"), "--follow", "0.01"]) == 0
    (run,) = read_runs([str(tmp_path / "run")]).values()
    assert [(test["checkpoint"], test["iter"]) for test in run.tests] == [("epoch_2", 8)]  # the others are removed
    assert read_verdict(find_log_dir(tmp_path / "run")) is None
    untested = ["--config.test_cfg=None", "--config.test_dataloader=None", "--config.test_evaluator=None"]
    assert main(["test", config, str(tmp_path / "run"), "--follow", *untested]) == 2
    assert "or the sections of a test in the config" in capsys.readouterr().err


def test_a_checkpoint_that_was_removed_is_named(followed, tmp_path, capsys, monkeypatch):
    shutil.copytree(followed, tmp_path / "run")
    log_dir = find_log_dir(tmp_path / "run")
    shutil.rmtree(log_dir / "evaluations")
    opened = []

    def remove(self, *arguments, **settings):
        opened.append(self.path)
        if len(opened) == 1:
            shutil.rmtree(self.path)
        return load(self, *arguments, **settings)

    load = LoadFrom.open
    monkeypatch.setattr(LoadFrom, "open", remove)
    assert follow(tmp_path / "run") == 0
    assert "epoch_1 (iteration 4): was gone before it was evaluated" in capsys.readouterr().out
    assert [score.gone for score in read_scores(log_dir)] == [True, False, False]


def test_a_process_beside_the_trainer_validates_until_the_end(tmp_path):
    work_dir = tmp_path / "run"
    assert train(work_dir, "--config.val_cfg.follow=True") == 0
    log_dir = find_log_dir(work_dir)
    lines = (log_dir / "vis_data/scalars.json").read_text().splitlines()
    assert [row["iter"] for row in map(json.loads, lines) if row.get("mode") == "val"] == [4, 8, 12]
    assert "epoch_3 (iteration 12): loss: " in (log_dir / "follower.log").read_text()
    assert find_best_checkpoint(work_dir) == str(work_dir / "epoch_3")
    assert [path.name for path in work_dir.glob("epoch_*")] == ["epoch_3"]


def test_a_follower_evaluates_checkpoints_in_a_bucket(gs_bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("JENGINE_LOCAL_DIR", str(tmp_path))
    monkeypatch.setenv("JENGINE_LEASE_SECONDS", "1")
    work_dir = f"{gs_bucket}/run"
    assert train(work_dir, "--config.train_cfg.max_epochs=1") == 0
    assert follow(work_dir) == 0
    assert names(read_scores(find_log_dir(work_dir))) == ["epoch_1"]
    assert find_best_checkpoint(work_dir) == f"{work_dir}/epoch_1"
    (run,) = read_runs([work_dir]).values()
    assert run.curves[0]["val", "loss"][0] == [4]
