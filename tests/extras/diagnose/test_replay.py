import re
import sys
import textwrap

import pytest

from jengine.cli import main

pytestmark = pytest.mark.usefixtures("only_new_garbage")  # a check looks at all objects that exist

CONFIG = """
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from jengine.data import ArrayDataset
from jengine.model import FunctionalModel
from jengine.config import DATASETS, MODELS


@DATASETS.register_module(force=True)
class Ones(ArrayDataset):
    def __init__(self):
        super().__init__(dict(x=np.ones(8, np.float32)))


@MODELS.register_module(force=True)
class FallingLog(FunctionalModel):
    def __init__(self):
        super().__init__(lambda: {"w": 2.5 * jnp.ones(())}, lambda params, batch: jnp.log(params["w"]) * batch["x"])


def get_config():
    config = ConfigDict()
    config.model = dict(type="FallingLog")
    config.train_dataloader = dict(batch_size=2, dataset=dict(type="Ones"))
    config.train_cfg = dict(max_epochs=3)
    config.optim_wrapper = dict(optimizer=dict(type="SGD", lr=4.0))
    config.default_hooks = dict(checkpoint=None, logger=None)
    config.custom_hooks = [dict(type="NumericsGuardHook", max_in_row=2, interval=1)]
    return config
"""


EXPLICIT = CONFIG.replace('* batch["x"]', '* jax.sharding.reshard(batch["x"], jax.P("data"))').replace(
    "    return config",
    """    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    config.parallel = dict(type="Pjit", mesh=mesh)
    return config""",
)


@pytest.mark.parametrize("config", [CONFIG, EXPLICIT], ids=["one device", "explicit axes"])
def test_the_command_in_the_error_finds_the_operation(tmp_path, monkeypatch, capsys, config):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "falling.py").write_text(textwrap.dedent(config))
    # 2.5, then 2.5 - 4 / 2.5 = 0.9, then 0.9 - 4 / 0.9 < 0, whose logarithm is NaN
    assert main(["train", "falling.py"]) == 1
    error = capsys.readouterr().err
    assert re.search("(?s)FloatingPointError: .*jengine replay CONFIG .*/work_dirs/falling/numerics_iter_3.dump", error)
    assert main(["replay", "falling.py", "work_dirs/falling/numerics_iter_3.dump"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("the step of iteration 3:\n  loss: nan\n")
    assert "not finite, in the order of the computation:\n  loss: 1 element\n" in out
    assert "first operation:\n  NaN from `log`, at " in out
    assert 'jnp.log(params["w"])' in out


def test_a_loss_that_is_not_finite_is_an_error_with_the_command_of_the_guard(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    unguarded = CONFIG.replace('[dict(type="NumericsGuardHook", max_in_row=2, interval=1)]', "[]")
    (tmp_path / "config.py").write_text(textwrap.dedent(unguarded))
    assert main(["train", "config.py", "--work-dir", "run"]) == 1
    command = re.search(r"for `jengine replay` to compute again:\n\s*jengine (train .*)", capsys.readouterr().err)[1]
    assert command == "train config.py --work-dir run --config.default_hooks.guard.type=NumericsGuardHook"
    assert main(command.split()) == 1
    dump = re.search(r"jengine replay CONFIG (\S+)", capsys.readouterr().err)[1]
    assert main(["replay", "config.py", dump]) == 0


BAD_EXAMPLE = CONFIG.replace(
    'super().__init__(dict(x=np.ones(8, np.float32)))',
    'super().__init__(dict(x=np.array([1, 1, 1, 1, 1, -1, 1, 1], np.float32)))',
).replace(
    'super().__init__(lambda: {"w": 2.5 * jnp.ones(())}, lambda params, batch: jnp.log(params["w"]) * batch["x"])',
    'super().__init__(lambda: {"w": jnp.ones(())}, lambda params, batch: params["w"] * jnp.sqrt(batch["x"]))',
).replace('dataset=dict(type="Ones"))', 'dataset=dict(type="Ones"), sampler=dict(type="DefaultSampler", shuffle=False))').replace(
    "batch_size=2", "batch_size=4"
).replace("max_in_row=2", "max_in_row=1").replace("lr=4.0", "lr=0.0")  # fmt: skip


@pytest.fixture
def bad_dump(tmp_path, monkeypatch, capsys):
    """The dump of a step with one example of which the loss is NaN: sample 5, 1 in its batch of 4."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(textwrap.dedent(BAD_EXAMPLE))
    assert main(["train", "bad.py"]) == 1
    return re.search(r"jengine replay CONFIG (\S+)", capsys.readouterr().err)[1]


def test_bisect_names_the_example_of_which_the_loss_is_not_finite_and_its_sample(bad_dump, capsys):
    assert main(["replay", "bad.py", bad_dump, "--bisect"]) == 0
    out = capsys.readouterr().out
    assert "examples in the batch that alone make the loss or a gradient not finite: 1\n" in out
    assert "in Ones of train_dataloader: example 1 is sample 5\n" in out


def test_a_replay_with_checks_names_the_operation_the_example_and_the_line(bad_dump, capsys):
    assert main(["replay", "bad.py", bad_dump, "--check"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NaN from `sqrt` in the step of iteration 1, for example 1 of the batch, at ")
    assert 'params["w"] * jnp.sqrt(batch["x"])' in out


def test_the_command_with_checks_ends_at_the_first_step_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(textwrap.dedent(BAD_EXAMPLE))
    assert main(["train", "bad.py", "--check"]) == 1
    error = capsys.readouterr().err
    assert "CheckError: NaN from `sqrt` in the step of iteration 1, for example 1 of the batch, at " in error
    assert "in Ones of train_dataloader: example 1 is sample 5" in error


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A directory for stand-ins of packages, which are forgotten afterwards."""
    directory = tmp_path / "packages"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    yield directory
    for name in [path.stem for path in directory.glob("*.py")]:
        sys.modules.pop(name, None)


def test_the_command_with_checks_lets_jaxtyping_check_the_modules_beside_the_config(tmp_path, monkeypatch, capsys, packages):
    monkeypatch.delitem(sys.modules, "jaxtyping", raising=False)
    (packages / "beartype.py").write_text("")
    (packages / "jaxtyping.py").write_text(
        "import contextlib\ndef install_import_hook(modules, checker):\n"
        "    print('hook', *modules, checker)\n    return contextlib.nullcontext()\n"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("")
    (tmp_path / "bad.py").write_text("def get_config():\n    return dict(model=1)\n")
    assert main(["train", "bad.py", "--check"]) == 2
    assert "hook bad net beartype.beartype\n" in capsys.readouterr().out


CHECKER = """
import functools, inspect

def beartype(function):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            check(name, value)
        result = function(*args, **kwargs)
        check("return", result)
        return result

    def check(name, value):
        expected = function.__annotations__.get(name)
        if hasattr(expected, "dim_str") and not isinstance(value, expected):
            raise TypeError(name)

    return call
"""
ANNOTATED = """
import flax.linen as nn
from jaxtyping import Array, Float

class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Float[Array, "batch features"]) -> Float[Array, "batch 5"]:
        return nn.Dense(4)(x)
"""
ON_NET = """
import numpy as np
from annotated import Net
from jengine.data import ArrayDataset

def get_config():
    return dict(
        model=dict(type="LinenModel", module=dict(type=Net), inputs="x", loss=dict(type="CrossEntropy", label="y")),
        train_dataloader=dict(batch_size=4, dataset=dict(type=ArrayDataset, arrays=dict(x=np.ones((8, 3), np.float32), y=np.zeros(8, int)))),
        train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    )
"""


@pytest.mark.foreign
def test_a_shape_that_jaxtyping_refuses_is_named_with_its_function(tmp_path, monkeypatch, capsys, packages):
    pytest.importorskip("jaxtyping")
    (packages / "beartype.py").write_text(CHECKER)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "annotated.py").write_text(ANNOTATED)
    (tmp_path / "on_net.py").write_text(ON_NET)
    assert main(["train", "on_net.py", "--check"]) == 1
    error = capsys.readouterr().err
    assert "TypeCheckError: Type-check error whilst checking the return value of annotated.Net.__call__" in error
    assert "Actual value: f32[4,4]" in error
    assert "linen.py" not in error
    assert "_decorator.py" not in error
