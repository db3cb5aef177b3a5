"""`jengine train --debug` and `--overfit`, `jengine lr-find` and `jengine model`."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jengine.checkpoint import read_meta
from jengine.cli import main
from jengine.config import load_config, resolve
from jengine.extras.diagnose.lr_find import suggest
from jengine.extras.diagnose.schedule import preview_schedules
from jengine.extras.networks import LoRA
from jengine.model import CrossEntropy, FunctionalModel, NnxModel

CONFIG = """
import jax.numpy as jnp
import numpy as np
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.config import DATASETS, HOOKS, MODELS


@DATASETS.register_module(force=True)
class Slope(ArrayDataset):
    def __init__(self):
        super().__init__(dict(x=np.ones(64, np.float32), y=np.repeat(np.float32([1, 2]), 32)))


@MODELS.register_module(force=True)
class SlopeModel(FunctionalModel):
    def __init__(self):
        predict = lambda params, batch: params["a"] * batch["x"]
        super().__init__(
            lambda: {"a": jnp.zeros(())}, lambda p, batch: jnp.square(predict(p, batch) - batch["y"]) / 2, predict
        )


@MODELS.register_module(force=True)
def half_square():
    return lambda predictions, batch: jnp.square(predictions - batch["y"]) / 2


@HOOKS.register_module(force=True)
class CallsAll(Hook):
    def after_train_epoch(self, runner):
        print("stage: end of an epoch")

    def after_val_epoch(self, runner, metrics=None):
        print("stage: validated on", runner.val_loop.epoch_length)

    def before_save_checkpoint(self, runner, checkpoint):
        print("stage: saved at", runner.iter)

    def after_load_checkpoint(self, runner, checkpoint):
        print("stage: restored", checkpoint["meta"]["iter"])

    def after_test_epoch(self, runner, metrics=None):
        if "must_fail" in runner.cfg["vars"]:
            raise ValueError("after the test")


def get_config():
    evaluation = dict(batch_size=8, dataset=dict(type="Slope"))
    return dict(
        model=dict(type="SlopeModel"),
        train_dataloader=dict(batch_size=8, dataset=dict(type="Slope"), sampler=dict(type="DefaultSampler", shuffle=False)),
        train_cfg=dict(max_epochs=20, val_interval=5),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=10),
            dict(type="CosineAnnealingLR", by_epoch=True, begin=2, end=20),
        ],
        val_dataloader=evaluation, val_cfg=dict(), val_evaluator=dict(type="MeanLoss", loss=dict(type="half_square")),
        test_dataloader=evaluation, test_cfg=dict(), test_evaluator=dict(type="MeanLoss", loss=dict(type="half_square")),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=5, out_dir="elsewhere")),
        custom_hooks=[dict(type="CallsAll"), dict(type="EMAHook")],
        visualizer=dict(vis_backends=[dict(type="WandbVisBackend")]),
        vars=dict(),
    )
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "slope.py"
    path.write_text(CONFIG)
    return "slope.py"


def test_debug_does_everything_once_and_leaves_nothing(config, tmp_path, capsys):
    assert main(["train", config, "--debug"]) == 0
    out = capsys.readouterr().out
    stages = [line.removeprefix("stage: ") for line in out.splitlines() if line.startswith("stage: ")]
    assert stages[:3] == ["end of an epoch", "validated on 3", "saved at 3"]
    assert stages[-1] == "restored 3"
    assert "Memory of the training step" in out
    assert "It fits: " in out
    curve = preview_schedules(resolve(load_config(config)))["lr"]
    assert f"lr {', '.join(f'{rate:.4g}' for rate in curve[:3])}" in out  # those of 20 epochs
    assert "3 steps: loss 0.5, " in out
    assert "No loss reaches" not in out
    assert "saved, and restored at iteration 3" in out
    assert "The whole run has 160 iterations." in out
    assert [path.name for path in tmp_path.iterdir()] == ["slope.py"]


def test_debug_names_the_parameters_that_the_loss_does_not_reach(config, capsys):
    text = pathlib.Path(config).read_text().replace('"a": jnp.zeros(())', '"a": jnp.zeros(()), "b": jnp.ones(2)')
    text = text.replace('params["a"] * batch["x"]', 'params["a"] * batch["x"] + stop_gradient(params["b"].sum() - 2)')
    pathlib.Path(config).write_text("from jax.lax import stop_gradient\n" + text)
    assert main(["train", config, "--debug"]) == 0
    assert "No loss reaches the parameters b: a weight decay moves them" in capsys.readouterr().out


def test_debug_finds_what_would_fail_at_the_end(config, tmp_path, capsys):
    assert main(["train", config, "--debug", "--config.vars.must_fail=1"]) == 1
    assert "ValueError: after the test" in capsys.readouterr().err
    assert main(["train", config, "--debug", "--resume"]) == 2
    assert "--debug must be used with --resume PATH or without" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["slope.py"]


def test_overfit_trains_on_the_first_batches_in_a_directory_of_its_own(config, tmp_path, capsys):
    local = ["--config.visualizer=None", "--config.default_hooks=None", "--config.param_scheduler=None"]
    assert main(["train", config, "--overfit", "2", *local, "--config.train_cfg.max_epochs=10"]) == 0
    # the first batches have the target 1 alone: the weights reach it
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("The loss on 2 batches was 0.5 at first and is ")
    assert float(last.split(" is ")[1].split(" after ")[0]) < 1e-6
    assert "after 80 iterations" in last  # 10 epochs of 8, as without --overfit
    assert [path.name for path in (tmp_path / "work_dirs").iterdir()] == ["slope_overfit"]
    assert read_meta(str(tmp_path / "work_dirs" / "slope_overfit" / "epoch_10"))["meta"]["iter"] == 80


def test_lr_find_suggests_a_rate_below_that_at_which_the_loss_diverges(config, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out_of = ["lr-find", config, "--min", "1e-4", "--max", "100", "--steps", "60", "--png", "rates.png"]
    out_of.append("--config.train_dataloader.sampler=None")  # shuffled
    assert main(out_of) == 0
    out = capsys.readouterr().out
    # gradient descent on a loss of curvature 1 diverges at rates above 2
    suggestion = float(out.split("--config.optim_wrapper.optimizer.lr=")[1].split()[0])
    assert 0.01 < suggestion < 2
    assert ", and diverges above" in out
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rates.png", "slope.py"]
    assert main([*out_of[:2], "--steps", "500", "--max", "1e-3"]) == 2
    assert "--steps must be at most 160, the iterations of the run, got 500" in capsys.readouterr().err


def test_the_suggestion_is_where_the_loss_falls_fastest():
    rates = np.geomspace(1e-4, 1, 41)
    losses = 2 - np.tanh(3 * np.log10(rates / 1e-2)) + 10 * np.clip(rates - 0.3, 0, None)
    assert suggest(rates, losses) == pytest.approx(1e-2)


def test_model_prints_layers_parameters_and_flops(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    root = pathlib.Path(__file__).parents[3]
    assert main(["model", str(root / "configs" / "digits_cnn.py"), "--config.train_dataloader.batch_size=2"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "conv1_0" in line)
    # two images: 121 products of a kernel and an image within it, 32 x 64 times, each with an addition
    assert [part.strip() for part in row.split("│")[1:6]] == [
        "conv1_0", "Conv", "float32[2,8,8,32]", "float32[2,4,4,64]", "991232",
    ]  # fmt: skip
    assert "Total Parameters: 66,218 (264.9 KB)" in out
    assert "FLOPs of a batch, in matrix products and convolutions alone: 4.677e+06 in prediction" in out


def test_tables_of_other_models():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.noise = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, *, rngs):
            return self.noise(self.first(x), rngs=rngs)

    model = NnxModel(Net, loss=CrossEntropy(), inputs="x")
    table = LoRA(model, rank=1, targets=["first"]).tabulate({"x": np.zeros((3, 4), np.float32)})
    row = next(line for line in table.splitlines() if "first" in line)
    assert [part.strip() for part in row.split("│")[1:6]] == ["first", "Linear", "float32[3,4]", "float32[3,8]", "216"]
    functions = FunctionalModel(lambda: {"w": {"k": jnp.zeros((2, 3))}}, lambda params, batch: 0)
    assert "| w.k       | float32 | (2, 3) |       6 |    24 |" in functions.tabulate({})
