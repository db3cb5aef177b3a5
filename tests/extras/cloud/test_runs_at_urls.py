import json
import os
import re
import time

import pytest

from jengine.checkpoint import WorkDirLockedError
from jengine.cli import main
from jengine.config.storage import list_files, read_bytes, write_bytes
from jengine.extras.cloud.lease import Lease
from jengine.extras.cloud.url_files import get_filesystem
from jengine.hooks import Hook

CONFIG = """
import os
import signal

import jax.numpy as jnp

from jengine.hooks import Hook
from jengine.model import FunctionalModel


class Kill(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if os.environ.get("KILL_AT") == str(runner.iter + 1):
            runner.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def get_config():
    return dict(
        model=FunctionalModel(lambda rng: {"w": jnp.zeros(())}, lambda params, batch: (params["w"] - batch) ** 2),
        train_dataloader=[jnp.full(4, float(i)) for i in range(4)],
        train_cfg=dict(max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1), checkpoint=dict(type="CheckpointHook", interval=1)),
        custom_hooks=[Kill()],
        randomness=dict(seed=0),
    )
"""


@pytest.fixture(autouse=True)
def local_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("JENGINE_LOCAL_DIR", str(tmp_path / "machine"))
    monkeypatch.setenv("JENGINE_LEASE_SECONDS", "1")
    monkeypatch.setenv("JENGINE_UPLOAD_SECONDS", "3600")  # only before a checkpoint is sealed, and at the end


def read_scalars(directory):
    """Return the lines of the scalar file in the only log directory, without times."""
    (name,) = [name for name in list_files(directory) if name.endswith("scalars.json")]
    rows = map(json.loads, read_bytes(f"{directory}/{name}").splitlines())
    rows = [{key: value for key, value in row.items() if "time" not in key and "/" not in key} for row in rows]
    return [row for row in rows if "loss" in row]


def read_log(directory):
    """Return the lines of the log with losses, without times."""
    (name,) = [name for name in list_files(directory) if name.endswith(".log")]
    lines = read_bytes(f"{directory}/{name}").decode().splitlines()
    return [re.sub(r"^.*INFO - |eta: \S+|(data_)?time: \S+", "", line) for line in lines if "loss: " in line]


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_logs_scalars_and_config_equal_those_of_a_local_run(request, scheme, make_runner, tmp_path):
    url = f"{request.getfixturevalue(f'{scheme}_bucket')}/run"
    settings = dict(
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=1)),
        randomness=dict(seed=0), cfg=dict(note=1, work_dir="given by the command line"),
    )  # fmt: skip
    local = make_runner(validates=True, **settings)
    local.train()
    remote = make_runner(work_dir=url, validates=True, **settings)
    assert (remote.work_dir, local.local_dir) == (url, local.work_dir)
    assert os.path.dirname(remote.local_dir) == str(tmp_path / "machine")
    assert not os.path.exists(remote.local_dir)  # as long as the run may be refused
    remote.train()
    assert len(read_scalars(url)) == 8 + 2
    assert read_scalars(url) == read_scalars(tmp_path / "run")
    assert read_log(url) == read_log(tmp_path / "run")
    assert read_bytes(f"{url}/config.py") == read_bytes(tmp_path / "run/config.py")
    names = {re.sub(r"\d{8}_\d{6}(_\d+)?", "T", name) for name in list_files(url)}
    assert names == {re.sub(r"\d{8}_\d{6}(_\d+)?", "T", name) for name in list_files(tmp_path / "run")}  # and no lock
    (name,) = [name for name in list_files(url) if name.endswith("run.json")]
    assert json.loads(read_bytes(f"{url}/{name}"))["sessions"][-1]["status"] == "finished"


def test_a_killed_run_continues_on_another_machine_without_lost_or_doubled_lines(
    run_python, gs_bucket, tmp_path, monkeypatch, caplog
):
    url = f"{gs_bucket}/run"
    write_bytes(f"{gs_bucket}/configs/kill.py", CONFIG.encode())
    command = ["train", f"{gs_bucket}/configs/kill.py", "--work-dir", url, "--resume"]
    killed = run_python("from jengine.cli import main; main()", *command, env={**os.environ, "KILL_AT": "7"})
    assert killed.returncode == -9
    assert [row["step"] for row in read_scalars(url)][:4] == [1, 2, 3, 4]  # sent before the checkpoint was sealed
    monkeypatch.setenv("JENGINE_LOCAL_DIR", str(tmp_path / "other_machine"))
    assert main(command) == 0
    assert "ended without releasing its lock; taking over" in caplog.text
    assert [row["step"] for row in read_scalars(url)] == list(range(1, 13))
    assert main(["train", f"{gs_bucket}/configs/kill.py", "--work-dir", str(tmp_path / "run")]) == 0
    assert read_scalars(url) == read_scalars(tmp_path / "run")
    assert list(dict.fromkeys(read_log(url))) == read_log(tmp_path / "run")  # it shows what was trained again
    assert main(["ckpt", "ls", url]) == 0


def test_a_second_run_is_refused_and_leaves_nothing(gs_bucket, make_runner, tmp_path):
    url = f"{gs_bucket}/run"
    lease = Lease(url)
    lease.acquire()
    with pytest.raises(WorkDirLockedError, match=f"another run is training in {url}: process {os.getpid()} on host"):
        make_runner(work_dir=url).train()
    assert set(list_files(url)) == {"run.lock"}
    assert not (tmp_path / "machine").exists()
    lease.release()


def test_a_run_that_another_has_replaced_stops_and_writes_nothing_more(gs_bucket, make_runner, tmp_path, caplog):
    url = f"{gs_bucket}/run"
    before = {}

    class Recorder(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == 2:
                write_bytes(f"{url}/run.lock", b'{"pid": 7, "host": "node-1", "since": "noon"}')
                before.update(list_files(url))
                deadline = time.monotonic() + 30
                while "lost its lock" not in caplog.text and time.monotonic() < deadline:
                    time.sleep(0.01)

    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=dict(type="LoggerHook", interval=1))
    runner = make_runner(work_dir=url, default_hooks=hooks, custom_hooks=[Recorder()])
    with pytest.raises(
        WorkDirLockedError, match="in .*/run: process 7 on host node-1, since noon; this run was paused"
    ):
        runner.train()
    assert runner.iter == 2
    assert list_files(url) == before
    assert f"some files of the run were not sent to {url}: they are in {runner.local_dir}" in caplog.text
    assert get_filesystem(url).cat_file(f"{url}/run.lock").startswith(b'{"pid": 7')
