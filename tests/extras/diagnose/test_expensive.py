import re

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jengine.cli.main import main
from jengine.data import ArrayDataset
from jengine.extras.diagnose.expensive import Place, find_places

CONFIG = """
from tests.extras.diagnose.test_expensive import Wide, make_samples, square
import jengine

def get_config():
    return dict(
        model=dict(type="LinenModel", module=dict(type=Wide), inputs="x", loss=square),
        train_dataloader=dict(batch_size=64, dataset=dict(type=make_samples)),
        train_cfg=dict(by_epoch=False, max_iters=8),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=1e-6)),
        work_dir="run",
    )
"""


def make_samples():
    x = np.random.RandomState(0).randn(1024, 2).astype(np.float32)
    return ArrayDataset(dict(x=x, y=x[:, 0]))


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="narrow")(nn.Dense(1024, name="middle")(nn.Dense(1024, name="wide")(x)))[:, 0]


def square(predictions, batch):
    return jnp.square(predictions - batch["y"])


def test_the_command_prints_the_most_expensive_operations_by_layer(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    assert main(["train", "config.py", "--profile", "3:6"]) == 0
    out = "".join(capfd.readouterr())
    assert "most expensive operations in 3 iterations" in out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if re.match(r"\| (wide|middle|narrow) ", line)]
    assert rows[0][0] == "middle"  # by far the most products
    assert {row[2] for row in rows} == {"", "backward"}
    assert all(float(row[3]) > 0 for row in rows)
    assert list((tmp_path / "run").rglob("iter_3/**/*.xplane.pb"))


def test_operations_without_a_layer_have_the_users_line():
    text = '''HloModule jit_step

FileNames
1 "/home/me/net.py"
2 "/venv/lib/python3.11/site-packages/jax/_src/numpy/ufuncs.py"

FunctionNames
1 "loss"
2 "sin"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=58}
2 {file_name_id=2 function_name_id=2 line=2 end_line=2 column=22 end_column=32}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}


ENTRY %main {
  %sin.1 = f32[4]{0} sine(%x), metadata={op_name="jit(step)/sin" stack_frame_id=2}
  ROOT %dot.2 = f32[4]{0} dot(%x, %y), metadata={op_name="jit(step)/jvp(Net)/first/dot_general" stack_frame_id=2}
}
'''
    assert find_places(text) == {
        "sin.1": ("sine", Place("net.py:12", "sin", False)),
        "dot.2": ("dot", Place("first", "dot_general", False)),
    }
