"""Test the best checkpoint of a run: on the command line, in Python and at the end of training."""

import shutil

import numpy as np
import pytest

import jengine
from jengine.checkpoint import CorruptCheckpointError, find_best_checkpoint, list_best_checkpoints
from jengine.cli import main
from jengine.config import ConfigError, load_config
from jengine.extras.report.run_table import read_table
from tests.refusals import check_refusal

# Gradient -1 with a rate of 1: the parameter is the number of iterations. The first metric is best at 2, the second at 3.
CONFIG = """
import jax.numpy as jnp
import numpy as np
from jengine.config import MODELS
from jengine.model import FunctionalModel


@MODELS.register_module(force=True)
class CountingModel(FunctionalModel):
    def __init__(self):
        super().__init__(
            lambda: {"w": jnp.zeros(())},
            lambda params, batch: -params["w"] * jnp.ones_like(batch["x"]),
            lambda params, batch: params["w"] * jnp.ones_like(batch["x"]),
        )


def distance(target):
    return lambda predictions, batch: jnp.abs(predictions - target)


def data():
    return [{"x": np.zeros(4, np.float32)}]


def get_config():
    evaluator = [dict(type="MeanLoss", prefix=f"from{i}", loss=dict(type=distance, target=i)) for i in (2, 3)]
    loader = dict(type=data)
    return dict(
        model=dict(type="CountingModel"),
        train_dataloader=loader, train_cfg=dict(max_epochs=5, val_interval=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=1.0)),
        val_dataloader=loader, val_cfg=dict(), val_evaluator=evaluator,
        test_dataloader=loader, test_cfg=dict(), test_evaluator=evaluator,
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best=["from2/loss", "from3/loss"])),
    )
"""
BATCH = {"x": np.zeros(1, np.float32)}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("counting") / "counting.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def trained(config):
    """Train for five iterations, and return the work dir."""
    work_dir = config.parent / "work"
    assert main(["train", str(config), "--work-dir", str(work_dir)]) == 0
    return work_dir


def build(config, work_dir, *overrides, **changes):
    return jengine.Runner.from_cfg({**load_config(config, list(overrides)), "work_dir": str(work_dir), **changes})


def test_the_best_checkpoint_is_that_of_the_metric(trained):
    found = list_best_checkpoints(trained)
    assert {metric: (best.score, best.iteration) for metric, best in found.items()} == {
        "from2/loss": (0.0, 2), "from3/loss": (0.0, 3),
    }  # fmt: skip
    assert find_best_checkpoint(trained, "from3/loss") == str(trained / "best_from3_loss_epoch_3")
    (row,) = read_table([trained]).rows
    assert row.best_checkpoint("from2/loss") == str(trained / "best_from2_loss_epoch_2")


def test_a_loaded_model_has_the_best_weights(trained):
    assert jengine.load_model(trained, trust=True)(BATCH) == 5
    assert jengine.load_model(trained, best="from2/loss", trust=True)(BATCH) == 2


@pytest.mark.parametrize(
    ("work_dir", "metric", "error", "words"),
    [
        ("work", True, ConfigError, ["save_best", "got none of from2/loss, from3/loss"]),
        ("work", "from2/los", ConfigError, ["got 'from2/los'", "did you mean 'from2/loss'"]),
        ("work/epoch_5", True, ConfigError, ["got the checkpoint"]),
        ("wrk", True, FileNotFoundError, ["did you mean 'work'"]),
    ],
)
def test_a_best_checkpoint_that_is_not_there_is_one_error(trained, work_dir, metric, error, words):
    check_refusal(lambda: find_best_checkpoint(trained.parent / work_dir, metric), error, *words)


def test_a_copy_without_times_and_without_the_newest_checkpoint_has_the_same_best_ones(trained, tmp_path):
    for name in ("best_from3_loss_epoch_3", "best_from2_loss_epoch_2"):
        shutil.copytree(trained / name, tmp_path / name, copy_function=shutil.copyfile)
    assert list_best_checkpoints(tmp_path)["from2/loss"].iteration == 2
    assert list_best_checkpoints(tmp_path)["from3/loss"].iteration == 3


def test_a_damaged_best_checkpoint_is_an_error_and_not_another_one(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "work")
    (tmp_path / "work/best_from2_loss_epoch_2/manifest.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError):
        jengine.load_model(tmp_path / "work", best="from2/loss", trust=True)


def test_the_commands_take_the_best_checkpoint(config, trained, tmp_path, capsys):
    command = ["test", str(config), str(trained), "--work-dir", str(tmp_path)]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "the best by from2/loss (0.0000) is best_from2_loss_epoch_2: --best from2/loss" in said.out + said.err
    assert main([*command, "--best", "from3/loss"]) == 0
    said = capsys.readouterr()
    assert "from3/loss: 0.0000" in said.out + said.err
    assert main(["ckpt", "export", str(trained), str(tmp_path / "w.safetensors"), "--best", "from2/loss"]) == 0
    assert main(["ckpt", "export", str(trained), str(tmp_path / "w.pth")]) == 2
    assert not (tmp_path / "w.pth").exists()
    assert "best_from2_loss_epoch_2" in capsys.readouterr().out


def test_a_metric_in_the_place_of_the_work_dir_is_explained(config, trained, capsys):
    with pytest.raises(SystemExit):
        main(["test", str(config), "--best", str(trained)])
    assert "(before --best, which may have a METRIC)" in capsys.readouterr().err


@pytest.mark.parametrize("averaged", [False, True])
def test_training_ends_with_the_best_weights(config, tmp_path, averaged):
    hooks = [dict(type="EMAHook", momentum=0.5)] if averaged else []
    runner = build(config, tmp_path, "train_cfg.load_best_at_end='from2/loss'", custom_hooks=hooks)
    state = runner.train()
    # the averages with a momentum of one half: 1, 1.5, 2.25, 3.125 and 4.0625
    assert runner.test()["from2/loss"] == (0.25 if averaged else 0)
    assert state.params["w"] == (3 if averaged else 2)
    assert (runner.iter, int(state.step)) == (5, 5)
    assert find_best_checkpoint(tmp_path, "from2/loss") == str(tmp_path / f"best_from2_loss_epoch_{3 if averaged else 2}")
    assert jengine.load_model(tmp_path, best="from2/loss", trust=True)(BATCH) == (2.25 if averaged else 2)
