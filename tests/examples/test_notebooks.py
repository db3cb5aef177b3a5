"""Run each notebook in a kernel of its own, without a browser, as Jupyter and Colab do with one."""

import itertools
import json
import os
import pathlib
import re

import pytest

from tests.run_again import check_runs_again, find_runs

ROOT = pathlib.Path(__file__).parents[2]
# What the configs of its runs lack first, as only a kernel has it; "" if they can be run again.
NOTEBOOKS = {
    "experiment": "",
    "first_run": "model.module.type",
    "language": "",
    "many_devices": "model.init",
    "own_parts": "model.init",
}


def run(name, directory, replace=()):
    """Run a notebook in `directory`; return what it prints, its other outputs, and the results of its cells.

    `replace` are pairs of an old and a new text in its cells.
    """
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    for (old, new), cell in itertools.product(replace, notebook.cells):
        cell.source = cell.source.replace(old, new)
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]  # a notebook sets it
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": " ".join(flags)}
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": directory}})
    client.execute(env=environment)
    for work_dir in find_runs(directory):
        lines = [line for path in work_dir.glob("*/*.log") for line in path.read_text().splitlines()]
        if not NOTEBOOKS[name]:
            check_runs_again(work_dir)
        else:
            assert any(f"cannot be run again: `{NOTEBOOKS[name]}` must" in line for line in lines)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    displays = [output.data for output in outputs if output.output_type == "display_data"]
    return text, displays, [output.data for output in outputs if output.output_type == "execute_result"]


def test_every_notebook_is_tested_and_stored_without_outputs():
    paths = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
    assert [path.stem for path in paths] == list(NOTEBOOKS)
    for path in paths:
        cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_the_first_run_learns_the_digits_and_continues(tmp_path):
    for package in ("sklearn", "matplotlib", "PIL", "plotly"):
        pytest.importorskip(package)
    text, displays, results = run("first_run", tmp_path)
    assert "got 'AdmaW'; did you mean 'AdamW'?" in text
    epochs = [int(number) for number in re.findall(r"\((\d), \d+, {'accuracy/top1'", text)]
    assert epochs == [1, 2, 3, 4, 5, 6, 7, 8]
    wrong, total = map(int, re.search(r"(\d+) of (\d+) are wrong", text).groups())
    assert total == 359
    assert wrong < 18  # an accuracy above 0.95
    assert text.count("\n| part  ") == 2  # tables are in the text, as on a terminal
    logs = [path.read_text() for path in (tmp_path / "work_dirs" / "first_run").glob("*/*.log")]
    assert sum(log.count("\n| part  ") for log in logs) == 2
    assert "Epoch(train)" not in text  # the picture has the loss
    assert sum(log.count("Epoch(train)") for log in logs) == 16
    bars = [display["text/html"] for display in displays if "<progress" in display.get("text/html", "")]
    assert [re.search(r'value="(\d+)" max="(\d+)"', bar).groups() for bar in bars] == [("88", "88"), ("176", "176")]
    assert [len(re.search(r'<polyline points="(.*?)"', bar)[1].split()) for bar in bars] == [8, 8]  # logged losses
    trained, report = [result.get("text/html", result["text/plain"]) for result in results]
    assert trained.startswith("TrainState(step=88, params=9,930 in 6 arrays, model_state=0 in 0 arrays, opt_state=")
    assert len(trained) < 200
    assert report.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')


@pytest.mark.many_processes
def test_the_own_hook_and_optimizer_find_the_weights(tmp_path):
    text, _, _ = run("own_parts", tmp_path)
    assert "80 1.00 2.00 3.00 4.00 loss 0.0000" in text
    assert "traces of the step: 1" in text
    assert "learning rates: 0.200, 0.100, 0.000" in text  # a cosine of 80 iterations
    weights = [float(weight) for weight in text.rsplit("80 ", 1)[1].split()[:4]]
    assert weights == pytest.approx([1, 2, 3, 4], abs=0.2)


@pytest.mark.many_processes
def test_many_devices_give_the_results_of_one(tmp_path):
    text, _, _ = run("many_devices", tmp_path)
    assert text.count("CpuDevice(id=") == 8
    differences = [float(value) for value in re.findall(r"differs .*by (\S+)", text)]
    assert len(differences) == 3
    assert max(differences) < 1e-4
    assert "whole: (64, 256) on each device: (64, 64)" in text
    assert "iterations: 40 updates: 10" in text
    assert "devices of the parameters: 8" in text


@pytest.mark.many_processes
def test_an_experiment_sweeps_and_exports_the_best_model(tmp_path):
    pytest.importorskip("sklearn")
    tiny = [("ITERATIONS, RATES, SEEDS = 150, [1e-3, 3e-3, 1e-2], 2", "ITERATIONS, RATES, SEEDS = 20, [1e-3, 1e-2], 1")]
    text, _, results = run("experiment", tmp_path, replace=[*tiny, ("width=32, depth=2", "width=8, depth=1")])
    assert len(re.findall(r"^\[[12]/2\] lr=.*: finished after", text, flags=re.M)) == 2
    assert results[0]["text/markdown"].startswith("| lr | best accuracy/top1 |")
    assert re.search(r"lr .* seed 0: accuracy 0\.\d+", text)
    assert results[1]["text/plain"] == "(ShapedArray(float32[batch,8,8,1]),)"
    assert (tmp_path / "best.jax_export").exists()


@pytest.mark.many_processes  # it trains for long; test_language_page trains, generates and samples as it does
def test_the_language_model_writes_the_lines_that_it_has_read(tmp_path):
    text, _, _ = run("language", tmp_path)
    assert "Sample at iteration 40: 'the '" in text
    for line in ("stars| are far away suns", "a river| runs to the sea", "the moon| follows the sun"):
        assert f"{line}\n" in text
    drawn = re.findall(r"^\['.*'\]$", text, flags=re.MULTILINE)
    assert len(drawn) == 4
    assert len(set(drawn)) > 1
