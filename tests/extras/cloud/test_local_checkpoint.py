import json
import shutil

import jax
import numpy as np
import pytest

from jengine import checkpoint
from jengine.config.errors import ConfigError
from jengine.config.storage import list_files, read_bytes
from jengine.extras.cloud.local_copies import POINTER, replace_unfit_copy
from jengine.hooks import Hook
from jengine.parallel.processes import SingleProcess
from tests.runner.conftest import make_runner as make_runner


class FailAt(Hook):
    """Fail within an iteration, so that nothing is saved: for the files as if the process had been killed."""

    def __init__(self, iteration):
        self.iteration = iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            raise ZeroDivisionError


@pytest.fixture
def train(make_runner, tmp_path):
    """Return a function that trains 16 iterations with a checkpoint each 6 and a local copy each 2, and its Runner."""

    def train(fail_at=None, resume=False, local="2", save=6, work_dir="run", logger=None, **changes):
        hooks = [FailAt(fail_at)] if fail_at is not None else []
        if local:
            interval = int(local) if local.isdigit() else local
            hooks.append(dict(type="LocalCheckpointHook", directory=str(tmp_path / "local"), interval=interval))
        runner = make_runner(
            work_dir=work_dir if "://" in work_dir else tmp_path / work_dir,
            train_cfg=dict(max_epochs=4),
            default_hooks=dict(
                logger=logger, checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=save, max_keep_ckpts=2)
            ),
            custom_hooks=hooks,
            resume=resume,
            **changes,
        )
        if fail_at is None:
            runner.train()
        else:
            with pytest.raises(ZeroDivisionError):
                runner.train()
            runner.close()
        return runner

    return train


def copies(tmp_path):
    return sorted(path.name for path in (tmp_path / "local").glob("*/process_0_of_1/iter_*"))


@pytest.mark.parametrize(
    ("save", "fail_at", "kept", "source"),
    [
        (6, 11, ["iter_10", "iter_8"], "process_0_of_1/iter_10"),
        (-1, 11, ["iter_10", "iter_8"], "process_0_of_1/iter_10"),
        (6, 13, ["iter_10", "iter_12"], "run/iter_12"),
    ],
    ids=["a copy newer than the checkpoint", "a copy before the first checkpoint", "a checkpoint as new as the copy"],
)
def test_a_restart_continues_from_the_newest_with_the_same_bits(train, tmp_path, save, fail_at, kept, source, caplog):
    expected = train(local="", work_dir="whole")
    broken = train(fail_at=fail_at, save=save)
    assert copies(tmp_path) == kept  # two of them
    assert (tmp_path / "run" / POINTER).read_text() == str(tmp_path / "local")
    again = train(resume=True, save=save)
    assert "Resumed from " in caplog.text
    assert source in caplog.text
    assert (again.run.run_id, again.seed, again.timestamp) == (broken.run.run_id, broken.seed, broken.timestamp)
    jax.tree.map(np.testing.assert_array_equal, again.state, expected.state)


@pytest.mark.parametrize("what", ["damaged", "lost"])
def test_a_damaged_or_lost_copy_is_not_used(train, tmp_path, what, caplog):
    expected = train(local="", work_dir="whole")
    train(fail_at=11)
    for path in (tmp_path / "local").rglob("d/*"):
        path.write_bytes(b"x" * path.stat().st_size)
    if what == "lost":
        shutil.rmtree(tmp_path / "local")
    again = train(resume=True)
    assert f"Resumed from {tmp_path / 'run' / 'iter_6'}" in caplog.text
    assert ("skipped the local copy" in caplog.text) is (what == "damaged")
    jax.tree.map(np.testing.assert_array_equal, again.state, expected.state)
    assert checkpoint.find_latest(tmp_path / "run").endswith("iter_16")


def test_a_copy_that_cannot_be_written_is_a_warning(train, tmp_path, caplog):
    (tmp_path / "local").write_text("a file where the directory should be")
    runner = train()
    assert runner.iter == 16
    assert "A local copy could not be written: could not save checkpoint" in caplog.text


def test_copies_may_be_written_by_time(train, tmp_path):
    train(fail_at=5, local="0.000001s")
    assert copies(tmp_path) == ["iter_4", "iter_5"]


def test_copies_of_the_future_are_removed(train, tmp_path):
    """A run that continues from the checkpoint because another host had no copy forgets what it did after it."""
    train(fail_at=11)
    (tmp_path / "run" / POINTER).unlink()
    train(resume=True, fail_at=7)
    assert copies(tmp_path) == []


def test_copies_with_other_shards_give_way_to_the_checkpoint(train, tmp_path):
    runner = train()
    copy = checkpoint.Checkpointer(tmp_path / "local", runner.run.run_id)
    copy.save(tmp_path / "local" / "iter_20", {"x": np.ones(2)}, {"meta": {"iter": 20, "layout": "of two processes"}})
    copy.close()
    path = str(tmp_path / "local" / "iter_20")
    found = replace_unfit_copy(tmp_path / "run", path, runner.state, SingleProcess())
    assert found == str(tmp_path / "run" / "iter_16")
    with pytest.raises(ConfigError, match="`parallel` must be that of the local copies, because .* has no checkpoint"):
        replace_unfit_copy(tmp_path / "empty", path, runner.state, SingleProcess())


def test_a_run_in_a_bucket_continues_from_a_copy_without_losing_a_line(train, tmp_path, gs_bucket, caplog):
    expected = train(local="", work_dir="whole", logger=dict(type="LoggerHook", interval=1))
    settings = dict(work_dir=f"{gs_bucket}/run", save=-1, logger=dict(type="LoggerHook", interval=1))
    train(fail_at=11, **settings)
    again = train(resume=True, **settings)
    assert "process_0_of_1/iter_10: epoch" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, again.state, expected.state)
    (name,) = [name for name in list_files(f"{gs_bucket}/run") if name.endswith("scalars.json")]
    lines = [json.loads(line) for line in read_bytes(f"{gs_bucket}/run/{name}").decode().splitlines()]
    assert [line["step"] for line in lines if "lr" in line] == list(range(1, 17))


def test_a_copy_of_the_work_dir_does_not_continue_from_local_copies_of_the_original(train, tmp_path):
    train(fail_at=9)
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    train(fail_at=11, resume=True)
    assert train(fail_at=7, resume=True, work_dir="backup").iter == 7  # from iteration 6, not from 8 or 10
