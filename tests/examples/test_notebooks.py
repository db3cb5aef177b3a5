"""Run the code cells of each notebook in a process of its own."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def read_code(path):
    """Return the code cells of a notebook as one script."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def run(name, directory):
    """Run a notebook in `directory` and return what it prints."""
    script = directory / f"{name}.py"
    script.write_text(read_code(ROOT / "examples" / "notebooks" / f"{name}.ipynb"), encoding="utf-8")
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]  # a notebook sets it
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "XLA_FLAGS": " ".join(flags)}
    done = subprocess.run(
        [sys.executable, script], cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_every_notebook_is_tested_and_stored_without_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "many_devices", "own_parts"]
    for path in NOTEBOOKS:
        cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_the_first_run_learns_the_digits_and_continues(tmp_path):
    for package in ("sklearn", "matplotlib", "PIL"):
        pytest.importorskip(package)
    text = run("first_run", tmp_path)
    assert "got 'AdmaW'; did you mean 'AdamW'?" in text
    epochs = [int(number) for number in re.findall(r"\((\d), \d+, {'accuracy/top1'", text)]
    assert epochs == [1, 2, 3, 4, 5, 6, 7, 8]
    wrong, total = map(int, re.search(r"(\d+) of (\d+) are wrong", text).groups())
    assert total == 359
    assert wrong < 18  # an accuracy above 0.95


def test_the_own_hook_and_optimizer_find_the_weights(tmp_path):
    text = run("own_parts", tmp_path)
    assert "80 1.00 2.00 3.00 4.00 loss 0.0000" in text
    assert "traces of the step: 1" in text
    assert "learning rates: 0.200, 0.100, 0.000" in text  # a cosine of 80 iterations
    weights = [float(weight) for weight in text.rsplit("80 ", 1)[1].split()[:4]]
    assert weights == pytest.approx([1, 2, 3, 4], abs=0.2)


def test_many_devices_give_the_results_of_one(tmp_path):
    text = run("many_devices", tmp_path)
    assert text.count("CpuDevice(id=") == 8
    differences = [float(value) for value in re.findall(r"differs .*by (\S+)", text)]
    assert len(differences) == 3
    assert max(differences) < 1e-4
    assert "whole: (64, 256) on each device: (64, 64)" in text
    assert "iterations: 40 updates: 10" in text
    assert "devices of the parameters: 8" in text
