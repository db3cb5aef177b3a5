"""Test the readers of weights that other extras provide."""

import pathlib
import shutil

import jengine

ROOT = pathlib.Path(jengine.__file__).parent
PLUGIN = 'provides = {"readers": {"mine": "jengine.extras.mine.reader"}}'
READER = """
import numpy as np
from jengine.extras.weights import WeightReader, open_weights

mine = WeightReader(
    "a .mine file",
    lambda path: path if path.suffix == ".mine" else None,
    lambda path, structure: open_weights({"fc": {"bias": [float(path.read_text())] * np.ones(2)}}),
)
"""


def test_an_extra_adds_a_format_of_weights(run_python, tmp_path):
    shutil.copytree(ROOT, tmp_path / "jengine", ignore=shutil.ignore_patterns("__pycache__"))
    extra = tmp_path / "jengine" / "extras" / "mine"
    extra.mkdir()
    (extra / "__init__.py").touch()
    (extra / "plugin.py").write_text(PLUGIN)
    (extra / "reader.py").write_text(READER)
    (tmp_path / "w.mine").write_text("4")
    code = """
import numpy as np
from jengine.extras import weights
params, _, _ = weights.load_pretrained("w.mine", {"fc": {"bias": np.zeros(2)}})
print(params["fc"]["bias"])
try: weights.locate_weights("w.mine/..")
except FileNotFoundError as error: print(error)
"""
    done = run_python(code, cwd=tmp_path)
    assert done.stdout.startswith("[4. 4.]"), done.stderr
    assert "weights must be a checkpoint or work dir of jengine, an .eqx file, a .mine file, " in done.stdout
