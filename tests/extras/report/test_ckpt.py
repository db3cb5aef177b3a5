import importlib.util
import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from jengine.checkpoint import Checkpointer, WorkDirLock, find_latest, load
from jengine.checkpoint.manifest import read_manifest, seal
from jengine.cli import main

CONFIG = """
import jax.numpy as jnp
import numpy as np
from jengine.data import ArrayDataset
from jengine.model import FunctionalModel
from jengine.config import DATASETS, MODELS


@DATASETS.register_module(force=True)
class Line(ArrayDataset):
    def __init__(self, size):
        x = np.linspace(-1, 1, size, dtype=np.float32)
        super().__init__(dict(x=x, y=2 * x + 1))


@MODELS.register_module(force=True)
class LineModel(FunctionalModel):
    def __init__(self):
        predict = lambda params, batch: params["head"]["kernel"][0, 0] * batch["x"] + params["head"]["bias"][0]
        super().__init__(
            lambda: {"head": {"kernel": jnp.zeros((1, 2)), "bias": jnp.zeros(2)}},
            lambda params, batch: jnp.square(predict(params, batch) - batch["y"]),
            predict,
        )


@MODELS.register_module(force=True)
def squared_error():
    return lambda predictions, batch: jnp.square(predictions - batch["y"])


def get_config():
    line = dict(batch_size=8, dataset=dict(type="Line", size=16))
    return dict(
        model=dict(type="LineModel"),
        train_dataloader=line,
        train_cfg=dict(max_epochs=5),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        val_dataloader=line,
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=dict(type="squared_error")),
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=2, keep_period=2, save_best="loss"),
            logger=None,
        ),
        custom_hooks=[dict(type="EMAHook", momentum=0.1)],
    )
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train for five epochs of two iterations each, with averages; return the work dir."""
    directory = tmp_path_factory.mktemp("line")
    (directory / "line.py").write_text(CONFIG)
    work_dir = directory / "work"
    assert main(["train", str(directory / "line.py"), "--work-dir", str(work_dir)]) == 0
    return work_dir


@pytest.fixture
def run(trained, tmp_path, capsys):
    """Return a copy of the work dir that a test may damage."""
    shutil.copytree(trained, tmp_path / "work")
    (tmp_path / "work" / "last_checkpoint").write_text(str(tmp_path / "work" / "epoch_5"))
    capsys.readouterr()
    return tmp_path / "work"


def read_table(out):
    """Return the rows of the table in `out` by their first cell."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_ls_lists_checkpoints_with_reasons(run, capsys):
    os.remove(run / "epoch_4" / "meta.json")
    assert main(["ckpt", "ls", str(run)]) == 0
    out = capsys.readouterr().out
    rows = read_table(out)
    assert list(rows) == ["checkpoint", "epoch_4", "epoch_2", "best_loss_epoch_5", "epoch_5"]
    epoch, iteration, saved, size, validation, reason, state = rows["epoch_2"]
    assert (epoch, iteration, reason, state) == ("2", "4", "every 2 epochs", "complete")
    assert saved == load(run / "epoch_2").meta["meta"]["time"]
    assert size.endswith("KiB")
    metrics = {entry[0]: entry[2] for entry in load(run / "best_loss_epoch_5").meta["validations"]}
    assert validation == f"loss {metrics[2]['loss']:.4g}"
    assert rows["epoch_5"][4:6] == [rows["best_loss_epoch_5"][4], "the latest"]
    assert rows["epoch_5"][4].startswith("loss 0.")
    assert rows["best_loss_epoch_5"][5].startswith("best by loss (0.")
    assert rows["epoch_4"][:3] == ["", "", ""]
    assert rows["epoch_4"][4:] == ["", "", "corrupt: meta.json is missing"]
    assert "4 checkpoints, " in out
    assert "training" not in out


@pytest.mark.parametrize("save_best", ["'loss'", "None"])
def test_ls_shows_the_validation_after_the_last_checkpoint(tmp_path, capsys, save_best):
    hooks = "--config.default_hooks"
    options = [f"{hooks}.checkpoint.save_best={save_best}", f"{hooks}.logger={{'type': 'LoggerHook', 'interval': 1}}"]
    (tmp_path / "line.py").write_text(CONFIG)
    work_dir = tmp_path / "work"
    assert main(["train", str(tmp_path / "line.py"), "--work-dir", str(work_dir), *options]) == 0
    capsys.readouterr()
    assert main(["ckpt", "ls", str(work_dir)]) == 0
    rows = read_table(capsys.readouterr().out)
    assert rows["epoch_5"][4].startswith("loss 0.")
    os.remove(next(work_dir.glob("*/vis_data/scalars.json")))  # the checkpoints alone
    assert main(["ckpt", "ls", str(work_dir)]) == 0
    assert read_table(capsys.readouterr().out)["epoch_2"][4] == rows["epoch_2"][4] != ""


def test_ls_reads_whole_lines_of_a_log_that_may_be_from_anyone(tmp_path, capsys):
    (tmp_path / "line.py").write_text(CONFIG.replace('save_best="loss"', "save_best=None"))
    work_dir = tmp_path / "work"
    assert main(["train", str(tmp_path / "line.py"), "--work-dir", str(work_dir)]) == 0
    (path,) = work_dir.glob("*/vis_data/scalars.json")
    rows = [
        dict(iter=8, mode="val", step=8, loss=0.25),
        dict(iter=10, mode="val", step=10, loss="NaN", note="text", shapes=[1], time=2.0),
        dict(iter=10, mode="train", step=10, grad_norm=3.0),
    ]
    path.write_text("\n".join(["[" * 1000, *map(json.dumps, rows), '{"iter": 10, "mode": "val", "loss": 3']))
    capsys.readouterr()
    assert main(["ckpt", "ls", str(work_dir)]) == 0
    assert read_table(capsys.readouterr().out)["epoch_5"][4] == "loss nan"
    path.write_bytes(b"\xff")
    assert main(["ckpt", "ls", str(work_dir)]) == 0
    assert read_table(capsys.readouterr().out)["epoch_5"][4] == ""
    path.unlink()
    os.mkfifo(path)
    assert main(["ckpt", "ls", str(work_dir)]) == 0


def test_ls_sorts_checkpoints_of_the_same_iteration_by_name(run, capsys):
    meta = run / "epoch_5" / "meta.json"
    time = load(run / "epoch_5").meta["meta"]["time"]
    meta.write_text(meta.read_text().replace(time, "2001" + time[4:]))
    manifest = read_manifest(run / "epoch_5")
    seal(run / "epoch_5", run=manifest.run, is_latest=manifest.is_latest, iteration=manifest.iteration)
    assert main(["ckpt", "ls", str(run)]) == 0
    assert list(read_table(capsys.readouterr().out))[-2:] == ["best_loss_epoch_5", "epoch_5"]


def test_ls_shows_published_copies_saves_in_progress_and_a_training_run(run, capsys):
    shutil.copytree(run / "epoch_2", run / "epoch_2-0123abcd")
    meta = {"meta": {"iter": 10, "time": "2999-01-01 00:00:00"}}
    (run / "epoch_2-0123abcd" / "meta.json").write_text(json.dumps(meta))
    seal(run / "epoch_2-0123abcd", run="", is_latest=False, iteration=None)
    (run / "epoch_6.incoming" / "state").mkdir(parents=True)
    (run / "epoch_6.incoming" / "meta.json").write_text("{}")
    lock = WorkDirLock(run)
    lock.acquire()
    assert main(["ckpt", "ls", str(run)]) == 0
    assert main(["ckpt", "rm", str(run), "epoch_6.incoming"]) == 2
    lock.release()
    out, err = capsys.readouterr()
    rows = read_table(out)
    assert rows["epoch_2-0123abcd"][5] == "published"
    assert rows["epoch_2"][5] == "every 2 epochs"
    assert rows["epoch_6.incoming"][6] == "being saved"
    assert "; a run is training there" in out
    assert "epoch_6.incoming is being saved by the run that is training" in err
    assert main(["ckpt", "rm", str(run), "epoch_6.incoming"]) == 0


def test_ls_of_an_empty_and_of_a_missing_directory(tmp_path, capsys):
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"
    assert main(["ckpt", "ls", str(tmp_path / "missing")]) == 2
    assert f"there is no work dir {tmp_path / 'missing'}" in capsys.readouterr().err


def test_a_link_lists_each_checkpoint_once_and_a_copy_leaves_the_original_unchanged(run, tmp_path, capsys):
    os.symlink(run, tmp_path / "link")
    assert main(["ckpt", "ls", str(tmp_path / "link")]) == 0
    assert "4 checkpoints, " in capsys.readouterr().out
    copy = shutil.copytree(run, tmp_path / "copy")  # its last_checkpoint points to the original
    assert main(["ckpt", "rm", str(copy), "epoch_5"]) == 2
    assert main(["ckpt", "rm", str(copy), "epoch_5", "--force"]) == 0
    assert (run / "epoch_5").exists()
    assert (copy / "last_checkpoint").read_text() == "epoch_4"


def test_checkpoints_in_an_out_dir_belong_to_the_run(tmp_path, capsys):
    checkpointer = Checkpointer(tmp_path / "work")
    checkpointer.save(tmp_path / "out" / "work" / "iter_3", {"params": {"a": np.ones(2)}}, {"meta": {"iter": 3}})
    checkpointer.close()
    assert main(["ckpt", "ls", str(tmp_path / "work")]) == 0
    assert read_table(capsys.readouterr().out)["iter_3"][5] == "the latest"
    checkpointer = Checkpointer(tmp_path / "work")
    checkpointer.save(tmp_path / "out" / "work" / "iter_6", {"params": {"a": np.ones(2)}}, {"meta": {"iter": 6}})
    checkpointer.close()
    assert main(["ckpt", "rm", str(tmp_path / "work"), "iter_6", "--force"]) == 0
    assert find_latest(tmp_path / "work") == str(tmp_path / "out" / "work" / "iter_3")


def test_show_prints_the_contents_of_a_checkpoint(run, capsys):
    assert main(["ckpt", "show", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{run / 'epoch_5'}\n")
    assert "  iter             10\n" in out
    assert "jax 0." in out
    assert "the state of CheckpointHook" in out
    assert "the config (" in out
    assert "params contains averages; the trained values are in hook_state.EMAHook.params" in out
    rows = read_table(out)
    assert rows["params.head.kernel"] == ["float32[1,2]", "8 B"]
    assert rows["rng"][0].startswith("uint32[")
    assert f"{len(rows) - 1} arrays: " in out


def test_rm_removes_checkpoints_and_prints_the_freed_size(run, capsys):
    assert main(["ckpt", "rm", str(run), "epoch_2", "best_loss_epoch_5"]) == 0
    out = capsys.readouterr().out
    assert f"removed {run / 'epoch_2'}\n" in out
    assert "freed " in out
    assert sorted(p.name for p in run.glob("*epoch*")) == ["epoch_4", "epoch_5"]
    assert find_latest(run) == str(run / "epoch_5")


def test_rm_refuses_the_latest_without_force(run, capsys):
    assert main(["ckpt", "rm", str(run), "epoch_4", "epoch_5"]) == 2
    assert "epoch_5 is the latest checkpoint, from which the run would resume" in capsys.readouterr().err
    assert (run / "epoch_4").exists()
    assert main(["ckpt", "rm", str(run), "epoch_5", "--force"]) == 0
    assert (run / "last_checkpoint").read_text() == "epoch_4"
    assert main(["ckpt", "rm", str(run), "epoch_4", "epoch_2", "best_loss_epoch_5", "--force"]) == 0
    assert not (run / "last_checkpoint").exists()


def test_rm_suggests_the_closest_name(run, capsys):
    assert main(["ckpt", "rm", str(run), "epoch_4", "best_los_epoch_5"]) == 2
    assert "has no checkpoint 'best_los_epoch_5'; did you mean 'best_loss_epoch_5'" in capsys.readouterr().err
    assert (run / "epoch_4").exists()


def test_export_writes_the_averaged_or_the_trained_parameters(run, tmp_path, capsys):
    checkpoint = load(run)
    raw = checkpoint.state["hook_state"]["EMAHook"]["params"]["head"]["kernel"]
    averaged = checkpoint.params["head"]["kernel"]
    assert raw[0, 0] != averaged[0, 0]
    file = tmp_path / "out" / "line.safetensors"
    for options, expected in (([], averaged), (["--ema"], averaged), (["--raw"], raw)):
        assert main(["ckpt", "export", str(run), str(file), *options]) == 0
        np.testing.assert_array_equal(load_file(file)["head.weight"], expected.T)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"averaged parameters of {run / 'epoch_5'}: 2 tensors, 16 B, written to {file}"
    assert out[2].startswith("parameters of ")


def test_export_errors_are_one_line_and_exit_code_2(run, tmp_path, capsys, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(tmp_path / "plain", {"params": {"a": np.ones(2)}}, {"meta": {"iter": 1}})
    checkpointer.close()
    file = str(tmp_path / "x.safetensors")
    assert main(["ckpt", "export", str(tmp_path / "plain"), file, "--ema"]) == 2
    assert "has no averaged parameters: the run had no EMAHook; leave out --ema" in capsys.readouterr().err
    assert main(["ckpt", "export", str(tmp_path / "plain"), file, "--batch-stats"]) == 2
    assert "has no 'model_state'" in capsys.readouterr().err
    os.remove(run / "epoch_5" / "meta.json")
    assert main(["ckpt", "export", str(run / "epoch_5"), file]) == 2
    assert "epoch_5 is corrupt: meta.json is missing" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["ckpt", "export", str(tmp_path / "plain"), file]) == 2
    assert capsys.readouterr().err == (
        "jengine: MissingPackageError: safetensors files require safetensors: pip install 'jengine[safetensors]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "x", "--forse"], "unknown argument --forse; expected one of: --help, --traceback, -h"),
        (["rm", "x", "y", "--forse"], "did you mean '--force'"),
        (["ls", "x", "--config.a=1"], "ckpt has no config to override, got --config.a=1"),
        (["export", "x", "y", "--ema", "--raw"], "not allowed with argument --ema"),
        (["rm", "x"], "NAME"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["ckpt", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_the_traceback_is_shown_on_demand(tmp_path):
    with pytest.raises(FileNotFoundError):
        main(["ckpt", "show", str(tmp_path), "--traceback"])
