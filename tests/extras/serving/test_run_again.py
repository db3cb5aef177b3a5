"""Check that the config in a work dir runs again, with the user's modules next to the original config."""

import functools
import os
import pathlib
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jengine import Runner, load_config
from jengine.checkpoint import load
from jengine.cli import main
from jengine.config import resolve
from jengine.data import ArrayDataset, DataLoader, DefaultSampler
from jengine.model import FunctionalModel

ROOT = pathlib.Path(__file__).parents[3]
MY_NET = """
import jax.numpy as jnp
from flax import linen as nn
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.config import HOOKS
import numpy as np


class MyNet(nn.Module):
    width: int = 2

    @nn.compact
    def __call__(self, x):
        import my_layers  # while the step is traced

        return my_layers.scale(nn.Dense(self.width)(x)[:, 0])


class Line(ArrayDataset):
    def __init__(self, size=16):
        x = np.linspace(-1, 1, size, dtype=np.float32)[:, None]
        super().__init__(dict(x=x, target=2 * x[:, 0] + 1))


@HOOKS.register_module(force=True)
class CountingHook(Hook):
    def after_run(self, runner):
        runner.logger.info(f"counted {runner.iter} iterations")
"""
CONFIG = """
import my_net  # registers the hook
from jengine.hooks import Hook


class OwnHook(Hook):
    def after_run(self, runner):
        runner.logger.info("my own hook")


def get_config():
    return dict(
        model=dict(type="LinenModel", module=dict(type="my_net.MyNet"), loss=dict(type="MeanSquaredError"), inputs="x"),
        train_dataloader=dict(batch_size=8, dataset=dict(type="my_net.Line")),
        train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        custom_hooks=[dict(type="CountingHook"), dict(type=OwnHook)],
    )
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write a project with a config and two modules next to it, and make it the working directory."""
    configs = tmp_path / "project" / "configs"
    configs.mkdir(parents=True)
    (configs / "my_net.py").write_text(MY_NET)
    (configs / "my_layers.py").write_text("def scale(x):\n    return 3.0 * x\n")
    (configs / "config.py").write_text(CONFIG)  # as the file in the work dir is called
    monkeypatch.chdir(configs.parent)
    return configs.parent


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def jengine(run_python):
    """The command `jengine`, in a new process."""
    return functools.partial(run_python, "from jengine.cli import main; sys.exit(main())")


def test_the_config_of_a_run_runs_again_elsewhere_with_the_same_result(jengine, project, tmp_path, capsys):
    first = jengine("train", "configs/config.py", "--work-dir", "work_dirs/a", cwd=project)
    assert first.returncode == 0, first.stderr
    assert "cannot be run again" not in first.stdout
    written = (project / "work_dirs" / "a" / "config.py").read_text()
    assert "CONFIG_MODULES = {'../../configs': ['config', 'my_net']}" in written
    assert "'type': 'config.OwnHook'" in written
    moved = tmp_path / "moved"
    shutil.copytree(project, moved)
    shutil.rmtree(project / "configs")
    again = jengine("train", moved / "work_dirs/a/config.py", "--work-dir", moved / "b", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "counted 2 iterations" in again.stdout
    assert "my own hook" in again.stdout
    for path in ("work_dirs/a/epoch_1", "b/epoch_1"):
        params = load(moved / path).params["Dense_0"]["kernel"]
        np.testing.assert_array_equal(params, load(project / "work_dirs/a/epoch_1").params["Dense_0"]["kernel"])
    # The copy of the visualizer and the config of the second run list the same modules.
    (copy,) = (moved / "b").glob("*/vis_data/config.py")
    assert main(["config", str(copy)]) == 0
    assert f"'{moved / 'configs'}': ['config', 'my_net']" in capsys.readouterr().out


SCRIPT = """
import optax
from jengine import Runner, load_model
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.config import DATASETS, HOOKS


@DATASETS.register_module()
class Ones(list):
    def __init__(self, count):
        super().__init__([{"x": 1.0}] * count)


class Twos(list):
    def __init__(self, count):
        super().__init__([{"x": 2.0}] * count)


class Halves(Hook):
    def __init__(self, factor):
        self.rate = 1 / factor

    def before_run(self, runner):
        runner.logger.info(f"rate {self.rate}")


def init():
    return {"w": 0.0}


def loss(params, batch):
    return (params["w"] - batch["x"]) ** 2


def predict(params, batch):
    return params["w"] + batch["x"]


if __name__ == "__main__":
    runner = Runner(
        FunctionalModel(init, loss, predict), "runs/mean", train_dataloader=dict(batch_size=2, dataset=Ones(8)),
        train_cfg=dict(max_epochs=1), optim_wrapper=dict(optimizer=dict(type=optax.sgd, learning_rate=0.1)), OPTIONS
    )
    runner.train()
    print(float(runner.state.params["w"]), load_model("runs/mean", trust=True).load({"x": 1.0})[0])
"""


def test_a_run_of_a_script_runs_again_is_loaded_and_exported(jengine, tmp_path):
    (tmp_path / "mean.py").write_text(SCRIPT.replace("OPTIONS", "custom_hooks=[Halves(2)],"))
    first = subprocess.run([sys.executable, "mean.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "cannot be run again" not in first.stdout
    assert first.stdout.splitlines()[-1].startswith("0.590")  # 1 - 0.8 ** 4
    again = jengine("train", "runs/mean/config.py", "--work-dir", "runs/again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "rate 0.5" in again.stdout
    params = [load(tmp_path / "runs" / name / "epoch_1").params["w"] for name in ("mean", "again")]
    np.testing.assert_array_equal(*params)
    command = ["ckpt", "export", tmp_path / "runs/again", "--jax-export", tmp_path / "out", "--platforms", "cpu"]
    exported = jengine(*command, "--trust", cwd=tmp_path / "runs")
    assert exported.returncode == 0, exported.stderr


def test_what_the_config_of_a_run_in_python_lacks_is_named_at_the_start_and_when_it_is_needed(tmp_path, capsys):
    text = SCRIPT.replace("OPTIONS", "").replace("Ones(8)", "Twos(8)").replace('if __name__ == "__main__":', "if True:")
    (tmp_path / "mean.py").write_text(text)
    first = subprocess.run([sys.executable, "mean.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    (line,) = [line for line in first.stdout.splitlines() if "cannot be run again" in line]
    assert "`model.init` must be a literal or importable" in line
    assert "of a script or notebook: write" in line
    assert "`train_dataloader.dataset` must be" in line
    assert "got Twos: write `dict(type=..., **arguments)`" in line
    assert main(["train", str(tmp_path / "runs" / "mean" / "config.py")]) == 2
    error = capsys.readouterr().err
    assert "the config must have `train_dataloader.dataset` (Twos), which the run that wrote it had in memory" in error


def test_a_config_that_cannot_be_run_again_is_reported_with_its_key(project, capsys):
    text = CONFIG.replace("dict(type=OwnHook)", "dict(type=OwnHook), dict(type=type('Local', (Hook,), {}))")
    (project / "configs" / "local.py").write_text(text)
    assert main(["train", "configs/local.py"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "cannot be run again" in line]
    assert len(lines) == 1
    assert "`custom_hooks[2].type` must be a literal or importable" in lines[0]


def test_worker_processes_import_the_modules_next_to_the_config(jengine, project):
    override = "--config.train_dataloader.num_workers=1"
    process = jengine("train", "configs/config.py", override, "--work-dir", "workers", cwd=project)
    assert process.returncode == 0, process.stderr
    assert "counted 2 iterations" in process.stdout


@pytest.mark.parametrize(
    ("module", "error", "line"),
    [
        ("\nimport torchh\n", "ModuleNotFoundError: No module named 'torchh'", 'broken.py", line 2, in <module>\n    import torchh'),
        ("from my_layers import scal\n", "ImportError: cannot import name 'scal'", 'broken.py", line 1, in <module>\n    from my_layers'),
        ("import helper\n", "NameError: name 'undefined' is not defined", 'helper.py", line 1, in <module>\n    x = undefined'),
        ("class Net(:\n", "SyntaxError: invalid syntax (broken.py, line 1)", "while importing 'broken'"),
        ("", "the module 'broken' ({file}) has no 'Net'", "must be a registered name or"),
    ],
)
def test_an_import_that_fails_shows_its_own_error_and_line(project, capsys, module, error, line):
    (project / "configs" / "broken.py").write_text(module)
    (project / "configs" / "helper.py").write_text("x = undefined\n")
    code = main(["train", "configs/config.py", "--config.model.module.type=broken.Net"])
    assert code == (1 if "in <module>" in line else 2)  # 1 for an error in code
    shown = capsys.readouterr().err
    assert error.format(file=project / "configs" / "broken.py") in shown
    assert line in shown
    assert "in the config at `model" in shown
    assert "did you mean" not in shown


def test_a_module_that_does_not_exist_is_named_with_the_closest(project, capsys):
    assert main(["train", "configs/config.py", "--config.model.type=my_nets.MyCNN"]) == 2
    shown = capsys.readouterr().err
    assert "there is no module 'my_nets' on sys.path or in " in shown
    assert "did you mean 'my_net'?" in shown
    assert "SmallCNN" not in shown


def test_a_moved_config_whose_modules_are_gone_says_which(project, tmp_path, capsys):
    assert main(["train", "configs/config.py", "--work-dir", "work_dirs/a"]) == 0
    copied = tmp_path / "elsewhere" / "config.py"
    copied.parent.mkdir()
    shutil.copy(project / "work_dirs" / "a" / "config.py", copied)
    capsys.readouterr()
    assert main(["train", str(copied)]) == 2
    shown = capsys.readouterr().err
    assert "`CONFIG_MODULES` must have the directory of config, my_net, got '../../configs'" in shown


def test_a_class_in_the_config_file_that_is_not_registered_is_named_with_its_path(project, capsys):
    assert main(["train", "configs/config.py", "--config.custom_hooks[1].type=OwnHook"]) == 2
    assert "'OwnHook' is not registered: write type='config.OwnHook', or register" in capsys.readouterr().err


def test_a_file_next_to_the_config_takes_precedence_over_a_registered_name(project, capsys):
    (project / "configs" / "nets.py").write_text(MY_NET.split("@HOOKS")[0].replace("MyNet", "SmallCNN"))
    assert main(["train", "configs/config.py", "--config.model.module.type=nets.SmallCNN"]) == 0
    assert "model:      2 tensors" in capsys.readouterr().out  # those of its one layer


class Batches:
    count = 3

    def __iter__(self):
        return iter([{"x": np.arange(4.0)}] * self.count)


class CountedBatches(Batches):
    def __init__(self, count):
        self.count = count


def make_dataset():
    return ArrayDataset(dict(x=np.linspace(0, 1, 16)))


def init():
    return {"w": jnp.ones(())}


def loss(params, batch):
    return jnp.square(params["w"] * batch["x"] - 1)


@pytest.mark.parametrize(
    "make_loader",
    [
        Batches,
        lambda: dict(type=CountedBatches, count=2),
        lambda: [{"x": np.arange(4.0)}] * 3,
        lambda: DataLoader(make_dataset(), 4),
        lambda: DataLoader(dataset := make_dataset(), 4, sampler=DefaultSampler(dataset, shuffle=True, seed=3)),
    ],
    ids=["iterable", "config of an iterable", "list", "loader", "loader with a sampler"],
)
def test_loaders_and_iterables_are_written_and_built_again(tmp_path, make_loader):
    settings = dict(train_cfg=dict(max_epochs=1), optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)))
    first = Runner(FunctionalModel(init, loss), tmp_path / "a", train_dataloader=make_loader(), **settings).train()
    cfg = resolve(load_config(tmp_path / "a" / "config.py"))
    second = Runner.from_cfg({**cfg, "work_dir": tmp_path / "b"}).train()
    assert first.params["w"] != 1
    assert first.params["w"] == second.params["w"]
