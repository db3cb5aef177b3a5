"""Runs whose checkpoints are in buckets: where they are saved, found and moved."""

import os

import pytest
from etils import epath

from jengine import checkpoint
from jengine.checkpoint.layout import read_current_run
from tests.runner.conftest import make_runner as make_runner


@pytest.fixture(params=["gs_bucket", pytest.param("s3_bucket", marks=pytest.mark.many_processes)])
def url(request, monkeypatch, tmp_path):
    monkeypatch.setenv("JENGINE_LEASE_SECONDS", "5")
    monkeypatch.setenv("JENGINE_LOCAL_DIR", str(tmp_path / "local"))
    return f"{request.getfixturevalue(request.param)}/runs/mine"


def save_to(**options):
    return dict(checkpoint=dict(type="CheckpointHook", interval=1, **options), logger=None)


def names(url):
    return [os.path.basename(path) for path in checkpoint.list_checkpoints(url)]


def test_a_run_is_resumed_from_its_bucket_and_another_moves_its_checkpoints(make_runner, url, caplog):
    first = make_runner(work_dir=url, default_hooks=save_to(max_keep_ckpts=1), train_cfg=dict(max_epochs=1))
    assert first.train().step == 4
    assert names(url) == ["epoch_1"]
    resumed = make_runner(work_dir=url, default_hooks=save_to(max_keep_ckpts=1), resume=True)
    assert resumed.train().step == 8
    assert f"Resumed from {url}/epoch_1" in caplog.text
    assert names(url) == ["epoch_2"]
    other = make_runner(work_dir=url, default_hooks=save_to(max_keep_ckpts=1), train_cfg=dict(max_epochs=1))
    other.train()
    assert f"The checkpoints of another run are now in {url}/earlier_1." in caplog.text
    assert (names(url), names(f"{url}/earlier_1")) == (["epoch_1"], ["epoch_2"])
    assert read_current_run(epath.Path(url)) == other.run.run_id
    back = make_runner(
        work_dir=url, default_hooks=save_to(), resume=f"{url}/earlier_1/epoch_2", train_cfg=dict(max_epochs=3)
    )
    assert back.train().step == 12


def test_checkpoints_are_in_a_bucket_while_the_logs_are_on_a_disk(make_runner, tmp_path, gs_bucket):
    out_dir = f"{gs_bucket}/checkpoints"
    make_runner(default_hooks=save_to(out_dir=out_dir), train_cfg=dict(max_epochs=1)).train()
    assert names(f"{out_dir}/run") == ["epoch_1"]
    assert (tmp_path / "run/last_checkpoint").read_text() == f"{out_dir}/run/epoch_1"
    assert make_runner(default_hooks=save_to(out_dir=out_dir), resume=True).train().step == 8
    weights = make_runner(work_dir=tmp_path / "other", load_from=f"{out_dir}/run/epoch_2", default_hooks=save_to())
    assert weights.train().step == 8
