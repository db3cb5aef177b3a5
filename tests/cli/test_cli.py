import json
import pathlib
import re
import subprocess
import sys

import pytest

from jengine.checkpoint import read_meta
from jengine.cli import main

CONFIG = """
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
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
        predict = lambda params, batch: params["a"] * batch["x"] + params["b"]
        super().__init__(
            lambda: {"a": jnp.zeros(()), "b": jnp.zeros(())},
            lambda params, batch: jnp.square(predict(params, batch) - batch["y"]),
            predict,
        )


@MODELS.register_module(force=True)
def squared_error():
    return lambda predictions, batch: jnp.square(predictions - batch["y"])


def get_config():
    config = ConfigDict()
    config.model = dict(type="LineModel")
    config.train_dataloader = dict(batch_size=8, dataset=dict(type="Line", size=32))
    config.train_cfg = dict(max_epochs=2)
    config.optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
    config.val_dataloader = dict(batch_size=8, dataset=dict(type="Line", size=8))
    config.val_cfg = dict()
    config.val_evaluator = dict(type="MeanLoss", loss=dict(type="squared_error"))
    config.test_dataloader, config.test_cfg = config.val_dataloader, dict()
    config.test_evaluator = config.val_evaluator
    config.custom_hooks = [dict(type="IterTimerHook", block=False)]
    return config
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    path = tmp_path / "line.py"
    path.write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return str(path)


def test_train_test_and_resume(config, tmp_path, capsys):
    assert main(["train", config, "--config.train_cfg.max_epochs=1"]) == 0
    work_dir = tmp_path / "work_dirs" / "line"
    out = capsys.readouterr().out
    for text in (
        "2 parameters",
        "Parameter groups",
        "hooks, in order",
        "Epoch(val) [1]",
        "Validations",
        "checkpoints:",
    ):
        assert text in out
    written = (work_dir / "config.py").read_text()
    assert "max_epochs" in written
    assert read_meta(work_dir)["meta"]["cfg"] == written
    assert main(["train", config, "--resume"]) == 0
    assert "Resumed from" in capsys.readouterr().out
    assert {"epoch_1", "epoch_2"} <= {p.name for p in work_dir.iterdir()}
    assert main(["test", config, str(work_dir / "epoch_2")]) == 0
    assert "Epoch(test) [1/1]" in capsys.readouterr().out


def test_resume_without_a_path_continues_the_work_dir_although_the_config_has_load_from(config, tmp_path, capsys):
    assert main(["train", config, "--work-dir", "first", "--config.train_cfg.max_epochs=1"]) == 0
    load_from = f"--config.load_from={tmp_path / 'first' / 'epoch_1'}"
    assert main(["train", config, "--resume=must", load_from]) == 2
    assert "`resume` must find a checkpoint in" in capsys.readouterr().err
    for max_epochs, line in (
        (1, "the run starts from the weights of load_from"),
        (2, "work_dirs/line/epoch_1: epoch 1"),
    ):
        assert main(["train", config, "--resume", load_from, f"--config.train_cfg.max_epochs={max_epochs}"]) == 0
        assert line in capsys.readouterr().out


def test_the_written_config_runs(config, tmp_path, capsys):
    assert main(["train", config, "--work-dir", "first", "--config.optim_wrapper.optimizer.lr=0.05"]) == 0
    assert main(["config", "first/config.py"]) == 0
    assert "'lr': 0.05" in capsys.readouterr().out.replace('"', "'")


def test_config_prints_the_config_with_overrides(config, capsys):
    assert main(["config", config, "--config.custom_hooks[0].block=True", "--config.train_cfg.max_epochs=7"]) == 0
    scope = {}
    exec(capsys.readouterr().out, scope)
    cfg = scope["get_config"]()
    assert cfg["custom_hooks"][0]["block"] is True
    assert cfg["train_cfg"]["max_epochs"] == 7


def test_groups_prints_the_table_and_leaves_no_files(config, tmp_path, capsys):
    override = "--config.optim_wrapper.paramwise_cfg={'custom_keys': {'.a': {'lr_mult': 0.5}}}"
    assert main(["groups", config, override]) == 0
    out = capsys.readouterr().out
    assert "Parameter groups" in out
    assert "0.05" in out
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".py" and p.name != "__pycache__"] == []


@pytest.mark.parametrize(
    ("arguments", "message", "path"),
    [
        (["--config.optim_wraper.optimizer.lr=1"], "did you mean 'optim_wrapper'", ""),
        (["--config.optim_wrapper.optimizer.lrr=1"], "did you mean 'lr'", "optim_wrapper.optimizer"),
        (["--config.optim_wrapper.optimizer.type=SDG"], "did you mean 'SGD'", "optim_wrapper.optimizer.type"),
        (["--config.custom_hooks[0].type=ItrTimerHook"], "did you mean 'IterTimerHook'", "custom_hooks[0].type"),
        (["--config.custom_hooks[0].priority=101"], "between 0 and 100, got 101", "custom_hooks[0]"),
        (["--config.custom_hooks[3].block=1"], "custom_hooks", ""),
        (["--resume", "nowhere"], "in the argument --resume of the command line", ""),
    ],
)
def test_a_mistake_in_the_config_is_three_lines_and_exit_code_2(config, tmp_path, capsys, arguments, message, path):
    assert main(["train", config, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jengine: ")
    assert message in error
    assert f"in the config at `{path}`" in error or not path
    assert "Traceback" not in error
    assert not (tmp_path / "work_dirs" / "line").exists() or "optim" in arguments[0]


def test_a_missing_config_is_an_error_with_similar_files(config, capsys):
    assert main(["train", config.replace("line.py", "lines.py")]) == 2
    assert "line.py" in capsys.readouterr().err


def test_the_traceback_is_shown_on_demand(config, capsys):
    with pytest.raises(KeyError, match="SGD"):
        main(["train", config, "--traceback", "--config.optim_wrapper.optimizer.type=SDG"])
    assert capsys.readouterr().err == ""  # without the lines for the user


BROKEN_HOOK = """
import jax.numpy as jnp
from jengine.hooks import Hook
from jengine.config import HOOKS


@HOOKS.register_module(force=True)
class Broken(Hook):
    def traced_grads(self, ctx):
        return ctx.replace(metrics={"product": multiply(ctx.batch["x"])})


def multiply(x):
    return x @ jnp.ones((3, 3))
"""


@pytest.fixture
def failing_step(config, tmp_path, capsys):
    """Train with a hook that fails inside the step; return the exit code and standard error."""
    (tmp_path / "broken_hook.py").write_text(BROKEN_HOOK)
    path = tmp_path / "line.py"
    path.write_text(
        f"import broken_hook\n{path.read_text()}".replace("IterTimerHook", "Broken").replace(", block=False", "")
    )
    code = main(["train", config])
    return code, capsys.readouterr().err


def test_an_error_in_the_first_trace_of_the_step_shows_the_frames_of_the_user_and_leaves_a_log(
    failing_step, tmp_path
):
    code, error = failing_step
    assert code == 1
    lines = error.splitlines()
    assert re.fullmatch(r"\(\d+ frames of libraries are left out: .*\.log has all, as has --traceback\)", lines.pop())
    frames = [line.strip() for line in lines if line.startswith("  File ")]
    hook = tmp_path / "broken_hook.py"
    assert frames == [f'File "{hook}", line 10, in traced_grads', f'File "{hook}", line 14, in multiply']
    message = next(index for index, line in enumerate(lines) if line.startswith("TypeError: dot_general requires"))
    assert lines[message + 1 :] == [
        "in Broken.traced_grads, within the step",
        "multiply was called with x f32[8]",
        "with the first batch of train_dataloader: the batch has x f32[8], y f32[8]",
        "in training, at iteration 0 (epoch 0)",
    ]
    log = next(tmp_path.glob("work_dirs/line/*/*.log")).read_text()
    assert "Training stops at iteration 0 with TypeError: dot_general requires" in log


def test_an_error_in_a_hook_ends_with_its_stage_and_iteration_and_the_log_file_has_all(
    config, tmp_path, capsys, monkeypatch
):
    from jengine.hooks import IterTimerHook

    def fail(self, runner, **arguments):
        raise ZeroDivisionError("in the hook")

    monkeypatch.setattr(IterTimerHook, "after_train_iter", fail)
    assert main(["train", config]) == 1
    error = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\(\d+ frames of libraries are left out: .*\.log has all, as has --traceback\)", error.pop())
    assert [line.strip() for line in error[-4:-1]] == [
        f'File "{__file__}", line {fail.__code__.co_firstlineno + 1}, in fail',
        'raise ZeroDivisionError("in the hook")', "ZeroDivisionError: in the hook",
    ]  # fmt: skip
    assert error[-1] == "in IterTimerHook.after_train_iter at iteration 0 (epoch 0)"
    log = next(tmp_path.glob("work_dirs/line/*/*.log")).read_text()
    assert log.count("Traceback (most recent call last)") == 1
    assert "jengine/runner/loops.py" in log
    assert "ZeroDivisionError: in the hook" in log


@pytest.mark.parametrize("argument", ["word", "--cfg-options", "--foo=x"])
def test_an_unknown_argument_is_refused_with_the_form_of_overrides(config, capsys, argument):
    with pytest.raises(SystemExit) as exit_:
        main(["train", config, argument, "seed=3"])
    assert exit_.value.code == 2
    assert f"unknown argument {argument}; --config.PATH=VALUE sets" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "argument", "known"),
    [("train", "--chek", "--check"), ("train", "--overfitt=3", "--overfit"), ("lr-find", "--stepz=3", "--steps"), ("train", "--xyz", None)],
)
def test_a_misspelled_option_is_named_with_the_closest_of_its_command(config, capsys, command, argument, known):
    with pytest.raises(SystemExit):
        main([command, config, argument])
    said = capsys.readouterr().err
    assert said.startswith(f"jengine {command}: error: ")
    assert said.count("\n") == 1
    assert f"unknown argument {argument.partition('=')[0]}" in said
    assert (f"did you mean {known!r}?" in said) if known else ("did you mean" not in said)


def test_help_imports_no_heavy_libraries():
    code = (
        "import sys, json; from jengine.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(json.dumps([m for m in ('jax', 'flax', 'optax', 'orbax', 'numpy') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         cwd=pathlib.Path(__file__).parents[2])  # fmt: skip
    assert json.loads(out.stdout.splitlines()[-1]) == []


BROKEN = {
    "class Data:\n    def __len__(self): return 8\n    def __getitem__(self, i):\n        return missing\n": (
        "cfg['train_dataloader']['dataset'] = dict(type='broken.Data')", "return missing", "NameError"),
    "def halve(sample):\n    return sampel['x'] / 2\n": (
        "cfg['train_dataloader']['dataset'] = dict(type='TransformedDataset', dataset=dict(type='broken.rows'), pipeline=['broken.halve'])",
        "return sampel['x'] / 2", "NameError"),
    "def stack(samples):\n    return samples.x\n": ("cfg['train_dataloader']['collate_fn'] = 'broken.stack'", "return samples.x", "AttributeError"),
    "class Loud:\n    def __init__(self):\n        raise KeyError('mode')\n": ("cfg['custom_hooks'] = [dict(type='broken.Loud')]", "raise KeyError('mode')", "KeyError: 'mode'"),
    "x = 1 / 0\n": ("cfg['custom_hooks'] = [dict(type='broken.Hook')]", "x = 1 / 0", "ZeroDivisionError"),
}  # fmt: skip
ROWS = "import numpy as np\nfrom jengine.data import ArrayDataset\ndef rows(): return ArrayDataset(dict(x=np.ones((8, 1), np.float32), y=np.ones((8, 2), np.float32)))\n"
BASE = """
def get_config():
    cfg = dict(model=dict(type="LinenModel", module=dict(type="flax.linen.Dense", features=2), loss=dict(type="MeanSquaredError", target="y"), inputs="x"),
        train_dataloader=dict(batch_size=4, dataset=dict(type="broken.rows")), optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)), train_cfg=dict(max_epochs=1))
    CHANGE
    return cfg
"""  # fmt: skip


@pytest.mark.parametrize("code", BROKEN)
def test_an_error_in_code_of_the_user_shows_its_line_and_exits_with_1(tmp_path, monkeypatch, capsys, code):
    change, line, message = BROKEN[code]
    (tmp_path / "broken.py").write_text(ROWS + code)
    (tmp_path / "cfg.py").write_text(BASE.replace("CHANGE", change))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    assert main(["train", str(tmp_path / "cfg.py"), "--work-dir", str(tmp_path / "run")]) == 1
    shown = capsys.readouterr().err
    assert f'File "{tmp_path}/broken.py", line ' in shown
    assert f"\n    {line}\n" in shown
    assert f"\n{message}" in shown
    assert "jengine/" not in shown.replace(str(tmp_path), "")


def test_an_error_in_a_config_file_shows_its_line_and_exits_with_2(tmp_path, capsys):
    (tmp_path / "cfg.py").write_text("def get_config():\n    return {'lr': rate}\n")
    assert main(["train", str(tmp_path / "cfg.py")]) == 2
    assert f'File "{tmp_path}/cfg.py", line 2, in get_config\n    return {{\'lr\': rate}}\n' in capsys.readouterr().err
