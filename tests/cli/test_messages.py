"""Test that the messages about frequent mistakes say what to write instead."""

import re

import jax
import pytest

from jengine.cli import main
from jengine.config.errors import did_you_mean

NETS = """
import flax.linen as nn
import numpy as np
from flax import nnx
from jengine.hooks import Hook


class Net(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Dense(self.width)(x))


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Conv(4, (3, 3))(x))


class PoolNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Conv(4, (3, 3))(x).mean((-3, -2)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.head = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.layer(x))


class NnxConvNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Conv(1, 2, (3, 3), rngs=rngs)])

    def __call__(self, x):
        return self.layers[0](x)


class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"x": np.full(5, i, np.float32), "y": np.int32(i % 2)}


class WideRows(Rows):
    def __getitem__(self, i):
        return {"x": np.full(7, i, np.float32), "y": np.int32(i % 2)}


class Images(Rows):
    def __init__(self, channels=0):
        self.shape = (4, 4, channels) if channels else (4, 4)

    def __getitem__(self, i):
        return {"x": np.full(self.shape, i, np.float32), "y": np.int32(i % 2)}


class StateHook(Hook):
    def state_dict(self):
        return {"f": len}


class FullDiskHook(Hook):
    def __init__(self, earlier):
        self.earlier = earlier

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        import pathlib
        from jengine.checkpoint import CheckpointSaveError
        from jengine.checkpoint.manifest import seal

        directory = pathlib.Path(runner.work_dir) / "saved"
        for i in range(self.earlier):
            (directory / f"epoch_{i + 1}" / "state").mkdir(parents=True)
            seal(directory / f"epoch_{i + 1}", "run", True, i)
        error = CheckpointSaveError("No space left on device")
        error.path = directory / "epoch_9"
        raise error


class OddRows(Rows):
    def __getitem__(self, i):
        return {"x": np.full(5 + (i == 6), i, np.float32), "y": np.int32(i % 2)}
"""
CONFIG = """
def get_config():
    loss = dict(type="CrossEntropy", label="y")
    return dict(
        model=dict(type="LinenModel", module=dict(type="mistaken_nets.Net"), loss=loss, inputs="x"),
        train_dataloader=dict(batch_size=4, dataset=dict(type="mistaken_nets.Rows")),
        val_dataloader=dict(batch_size=4, dataset=dict(type="mistaken_nets.Rows")),
        val_cfg=dict(), val_evaluator=dict(type="Accuracy", label="y"),
        train_cfg=dict(max_epochs=1), optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    )
"""
MISTAKES = {
    "an argument of another library": (
        ["optim_wrapper.optimizer.learning_rate=0.1"], r"SGD has no argument 'learning_rate'; did you mean 'lr'\?\n"
        r"  in the config at `optim_wrapper.optimizer`\n",
    ),
    "an argument that the Runner passes": (["val_cfg.speed=2"], r"no argument 'speed'; expected one of: epoch_length, evaluations, fp16\n"),
    "an input with too few axes": (
        ["model.module.type=mistaken_nets.ConvNet"],
        r"^jengine: ValueError: .*broadcast.*\n  `LinenModel.module` must be a network for the data, got ConvNet, whose layer Conv_0 \(Conv\) takes "
        r"\[batch, height, width, channels\], for the entry 'x', f32\[4,5\]\n"
        r"  called in __call__ at .*/mistaken_nets.py:19\n"
        r"  in the config at `model.module`\n"
        r"  with the first batch of train_dataloader: the batch has x f32\[4,5\], y i32\[4\]\n",
    ),
    "an input of NNX with too few axes": (
        ["model.type=NnxModel", "model.module.type=mistaken_nets.NnxConvNet"],
        r"got NnxConvNet, whose layer layers.0 \(Conv\) takes \[batch, height, width, channels\], for the entry 'x', f32\[4,5\]\n",
    ),
    "layers that do not fit": (
        ["model.type=NnxModel", "model.module.type=mistaken_nets.NnxNet"],
        r"got NnxNet, whose layer head \(Linear\) has in_features=4, not 8, for an input, f32\[4,8\]\n  called in __call__ at .*/mistaken_nets.py:33\n",
    ),
    "other inputs in the validation": (
        ["val_dataloader.dataset.type=mistaken_nets.WideRows"],
        r"whose layer Dense_1 \(Dense\) was made for samples of other shapes: .*\(7, 3\).*\(5, 3\), for the entry 'x', f32\[4,7\]\n"
        r"(  .*\n)*  with the first batch of val_dataloader: the batch has x f32\[4,7\], .*\n"
        r"  with the first batch of train_dataloader: the batch has x f32\[4,5\], y i32\[4\]\n",
    ),
    "images without channels": (
        [f"{mode}_dataloader.dataset.type=mistaken_nets.Images" for mode in ("train", "val")] + ["model.module.type=mistaken_nets.PoolNet"],
        r"`Accuracy.label` must fit the predictions: .* got f32\[2\] and i32\[4\]\n(  .*\n)*  the outputs have no axis of examples, .* x\[..., None\]\?",
    ),
    "images for a network that keeps their axes": (
        ["train_dataloader.dataset={'type': 'mistaken_nets.Images', 'channels': 3}", "val_dataloader=None", "val_cfg=None", "val_evaluator=None"],
        r"`CrossEntropy.label` must be class indices, integers of the shape of the logits f32\[4,4,4,2\] .*\n  in the config at `model.loss.label`\n"
        r"  the network keeps axes of its inputs: flatten them, x.reshape\(len\(x\), -1\), .*\n",
    ),
    "a misspelled loss": (
        ["model.loss.type=CrossEntrpy"],
        r"loss must be a registered name .* got 'CrossEntrpy'; did you mean 'CrossEntropy'\?\n  in the config at `model.loss.type`",
    ),
    "a misspelled key": (
        ["optim_wraper.optimizer.lr=1"], r"did you mean 'optim_wrapper'\?.*\n",
    ),
    "an entry that the batch has not": (
        ["model.loss.label=lable", "model.inputs=x"],
        r"got 'lable'; .*\n  in the config at `model.loss.label`\n",
    ),
    "an input that the batch has not": (
        ["model.inputs=image"],
        r"^jengine: UnknownNameError: `LinenModel.inputs` must be an entry of the batch, got 'image'; the batch has x f32\[4,5\], y i32\[4\]\n"
        r"  in the config at `model.inputs`\n$",
    ),
    "too many devices": (
        ["parallel={'type': 'Pjit', 'mesh': {'data': 64}}"],
        r"got 64 for .*; an axis of -1 takes all that are left",
    ),
    "a metric with an unknown direction": (
        ["default_hooks.checkpoint={'type': 'CheckpointHook', 'save_best': 'acuracy'}"],
        r"in the config at `default_hooks.checkpoint.save_best`\n"
        r"  val_evaluator has no metric 'acuracy'; did you mean 'accuracy/top1'\?\n",
    ),
    "a metric that does not exist, in a default hook without its type": (
        ["default_hooks.checkpoint.save_best=acuracy"], r"val_evaluator has no metric 'acuracy'; did you mean 'accuracy/top1'\?\n",
    ),
    "a state that cannot be saved": (
        ["custom_hooks=[{'type': 'mistaken_nets.StateHook'}]"],
        r"`StateHook.state_dict\(\).f` must be made of numbers, strings, .* got .*; leave it out, and make it again in `load_state_dict`\n",
    ),
    "a full disk": (
        ["custom_hooks=[{'type': 'mistaken_nets.FullDiskHook', 'earlier': 3}]"],
        r"^jengine: CheckpointSaveError: No space (.*\n)+  the disk is full. Free space, then continue from the last checkpoint with --resume; .*max_keep_ckpts` of 2",
    ),
    "a full disk with one checkpoint": (
        ["custom_hooks=[{'type': 'mistaken_nets.FullDiskHook', 'earlier': 1}]"], r"^jengine: CheckpointSaveError: (.*\n)+  the disk is full. .* --resume .*/saved/epoch_1 --work-dir DIR\.\n",
    ),
    "a validation with samples of other shapes": (
        ["val_dataloader.dataset.type=mistaken_nets.OddRows"],
        r"all input arrays must have the same shape\n(  .*\n)*"
        r"  samples of a batch must .* got 'x' of \(5,\) in sample 0 of the batch and of \(6,\) in sample 2, sample 6 of the dataset; pad or crop it .*\n"
        r"  in val_dataloader \(DataLoader\(OddRows\)\), batch 2\n",
    ),
    "one section of a validation": (
        ["val_evaluator=None"],
        r"the val sections must be complete or absent, got `val_dataloader` and `val_cfg` without `val_evaluator`; either give `val_evaluator`, or "
        r"set `val_dataloader` and `val_cfg` to None as well\n",
    ),
    "two lengths": (
        ["train_cfg.max_iters=5"], r"must have either max_epochs or max_iters, got max_epochs=1 and max_iters=5; remove one of them; on the command "
        r"line, --config.train_cfg.max_epochs=None --config.train_cfg.by_epoch=False trains for 5 iterations, and "
        r"--config.train_cfg.max_iters=None --config.train_cfg.by_epoch=True for 1 epochs\n",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Train the config without mistakes in `work_dirs/base`, and return its path."""
    root = tmp_path_factory.mktemp("mistakes")
    (root / "mistaken_nets.py").write_text(NETS)
    (root / "base.py").write_text(CONFIG)
    assert main(["train", str(root / "base.py"), "--work-dir", str(root / "base")]) == 0
    return root / "base.py"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_message_says_what_to_write(config, tmp_path, capsys, mistake):
    overrides, message = MISTAKES[mistake]
    command = ["train", str(config), "--work-dir", str(tmp_path), *(f"--config.{override}" for override in overrides)]
    assert main(command) in (1, 2)
    shown = capsys.readouterr().err
    assert re.search(message, shown), shown
    assert "Traceback" not in shown
    trains = ("a full disk", "a validation with samples")
    assert mistake.startswith(trains) or not list(tmp_path.glob("epoch_*"))  # nothing was trained


def test_without_the_devices_of_jax_platforms_the_error_names_the_variable(config, capsys, monkeypatch):
    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    assert main(["train", str(config)]) == 2
    message = r"^jengine: ConfigError: JAX must have devices of JAX_PLATFORMS, .* got none of .*: install jax .*, or unset it\n$"
    assert re.search(message, capsys.readouterr().err)


def test_a_test_without_its_sections_names_them_and_those_of_the_validation(config, capsys):
    assert main(["test", str(config), str(config.parent / "base")]) == 2
    assert capsys.readouterr().err.endswith(
        "jengine: ConfigError: the config must have `test_dataloader`, `test_cfg` and `test_evaluator`, got none of them; "
        "to test on the validation's data set them to those of `val_`\n"
    )


def test_a_checkpoint_that_does_not_exist_is_compared_with_those_that_do(config, capsys):
    work_dir = config.parent / "base"
    assert main(["test", str(config), f"{work_dir}/epoch_11"]) == 2
    assert capsys.readouterr().err.endswith("; did you mean 'epoch_1'?\n  in the argument CHECKPOINT of the command line\n")
    assert main(["train", str(config), "--work-dir", str(work_dir), "--resume", f"{work_dir}/best"]) == 2
    shown = capsys.readouterr().err
    assert f"{work_dir}/best" in shown
    assert "epoch_1" in shown
    assert shown.endswith("  in the argument --resume of the command line\n")


def test_a_resume_with_another_model_names_the_config_and_the_way_to_start_from_it(config, capsys):
    work_dir = config.parent / "base"
    wider = ["--resume", "--config.model.module.width=4", "--config.train_cfg.max_epochs=2"]
    assert main(["train", str(config), "--work-dir", str(work_dir), *wider]) == 2
    shown = capsys.readouterr().err
    assert "mismatched  params.Dense_1.kernel  stored float32[5,3], expected float32[5,4]" in shown
    cause = "the model has other settings, model.module.width: 4 in the config, not set in the checkpoint"
    assert f"  {cause}; to resume, remove model.module.width\n" in shown
    assert "in the config at `model.module.width`\n" in shown
    start = f"{{'path': '{work_dir}/epoch_1', 'strict': False}}"
    assert f"load_from=dict(path='{work_dir}/epoch_1', strict=False) in place of resume" in shown
    new = ["train", str(config), "--work-dir", str(work_dir.parent / "new"), wider[1], f"--config.load_from={start}"]
    assert main(new) == 0


def test_misspelled_commands_and_work_dirs_are_compared_with_those_that_exist(config, capsys):
    with pytest.raises(SystemExit):
        main(["trian", str(config)])
    assert capsys.readouterr().err.endswith("argument COMMAND: invalid choice: 'trian'; did you mean 'train'?\n")
    with pytest.raises(SystemExit):
        main(["train", str(config), "--max_epochs=2"])
    assert "--max_epochs=2; write --config.train_cfg.max_epochs=2" in capsys.readouterr().err
    assert main(["table", f"{config.parent}/bse"]) == 2
    assert capsys.readouterr().err.endswith(f"bse, which does not exist; did you mean '{config.parent}/base'?\n")
    assert main(["ckpt", "ls", f"{config.parent}/bse"]) == 2
    assert capsys.readouterr().err.endswith(f"no work dir {config.parent}/bse; did you mean '{config.parent}/base'?\n")
    assert main(["test", str(config), f"{config.parent}/bse"]) == 2
    assert "; did you mean 'base'?\n" in capsys.readouterr().err


def test_initials_are_suggested():
    assert did_you_mean("wd", ["lr", "weight_decay"]) == "; did you mean 'weight_decay'?"
    assert did_you_mean("learning_rate", ["betas", "lr"]) == "; did you mean 'lr'?"
    assert did_you_mean("_", ["a_b", "lr"]) == ""
