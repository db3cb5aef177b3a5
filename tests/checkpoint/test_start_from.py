"""Test which weights a run starts from with and without the extras that read other formats."""

import pathlib
import shutil
import subprocess
import sys

import pytest

import jengine

ROOT = pathlib.Path(jengine.__file__).parent

RUN = """
import flax.linen as nn, jax, numpy as np
from jengine import Runner, checkpoint

class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Dense(3, name=f"layers_{i}")(x)
        return nn.Dense(1, name="head")(x)[:, 0]

class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(3, name="fc")(x), None

class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(1, name="top")(blocks(name="blocks")(x, None)[0])[:, 0]

def run(module, work_dir, **settings):
    data = [{"x": np.ones(3, np.float32), "y": np.float32(1)}] * 4
    runner = Runner(
        dict(type="LinenModel", module=module(), inputs="x", loss=lambda out, batch: (out - batch["y"]) ** 2),
        work_dir, train_dataloader=dict(batch_size=2, dataset=data), train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)), **settings)
    return jax.device_get(runner.train().params)
"""

STACK = """
first = run(Layers, "work_dirs/first")
rename = [(r"layers_(\\d+)", "blocks.fc", dict(stack=0)), ("head", "top")]
second = run(Scanned, "work_dirs/second", load_from=dict(path="work_dirs/first", rename=rename))
for name in ("kernel", "bias"):
    stacked = np.stack([first[f"layers_{i}"][name] for i in range(2)])
    np.testing.assert_array_equal(second["blocks"]["fc"][name], stacked)
np.testing.assert_array_equal(second["top"]["kernel"], first["head"]["kernel"])
in_memory = run(Scanned, "work_dirs/third", load_from=second)
jax.tree.map(np.testing.assert_array_equal, in_memory, second)
"""

REFUSED = """
np.savez("w.npz", w=np.zeros(2))
for load_from in ("w.npz", dict(path="work_dirs/first", rename="gpt2"), dict(path="work_dirs/first", optimizer=True)):
    try:
        run(Layers, "work_dirs/fourth", load_from=load_from)
    except (ValueError, TypeError) as error:
        print(error)
"""

PLUGIN = 'provides = {"readers": {"mine": "jengine.extras.mine.reader"}}'
READER = """
from jengine.checkpoint import WeightReader, open_weights

mine = WeightReader(
    "a .mine file",
    lambda path: path if path.suffix == ".mine" else None,
    lambda path, structure: open_weights({"fc": {"bias": [float(path.read_text())] * np.ones(2)}}),
)
""".replace("from jengine", "import numpy as np\nfrom jengine", 1)


@pytest.fixture
def run_without(tmp_path):
    """Return a function that runs code with a copy of jengine without the extra `weights`."""
    ignore = shutil.ignore_patterns("__pycache__", "weights")
    shutil.copytree(ROOT, tmp_path / "jengine", ignore=ignore)

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_run_starts_from_own_checkpoints_without_the_extra_that_reads_others(run_without):
    refused = run_without(RUN + STACK + REFUSED)
    assert (
        "weights must be a checkpoint or work dir of jengine; or, in memory, a pytree of arrays"
        in refused
    )
    assert "w.npz; other formats need an extra that reads them" in refused
    assert (
        "`rename` must be a list of rules or a name that an extra provides, got 'gpt2'" in refused
    )
    assert (
        "`optimizer` must be False without an extra that reads other loops' optimizers" in refused
    )


def test_an_extra_adds_a_format_of_weights(run_without, tmp_path):
    extra = tmp_path / "jengine" / "extras" / "mine"
    extra.mkdir()
    (extra / "__init__.py").touch()
    (extra / "plugin.py").write_text(PLUGIN)
    (extra / "reader.py").write_text(READER)
    (tmp_path / "w.mine").write_text("4")
    code = """
import numpy as np
from jengine import checkpoint
params, _, _ = checkpoint.load_pretrained("w.mine", {"fc": {"bias": np.zeros(2)}})
print(params["fc"]["bias"])
try: checkpoint.locate_weights("w.mine/..")
except FileNotFoundError as error: print(error)
"""
    out = run_without(code)
    assert out.startswith("[4. 4.]")
    assert "weights must be a checkpoint or work dir of jengine, a .mine file; or, in memory" in out
