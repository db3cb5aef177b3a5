import re
import textwrap

import pytest

from jengine.cli import main

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
    assert "encountered in log" in out
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
