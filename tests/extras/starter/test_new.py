"""What `jengine new` writes: an experiment that trains at once, and a package whose parts jengine finds."""

import json
import re

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.extras.starter.new import write_project
from tests.docs_pages import PAGES

START = {"Dense_0.kernel": [[1.0, 0.5], [0.25, 2.0]], "Dense_0.bias": [0.0, 1.0], "Dense_1.kernel": [[1.0, 0.0, 2.0]] * 2}
START["Dense_1.bias"] = [3.0, 2.0, 1.0]
USE_ALL = """
import json, os, sys
sys.path.insert(0, os.path.abspath("boat_kit"))  # where an installation would put it
from jengine.cli import main
assert main(["boat-kit-batches", "spirals/spirals.py"]) == 0
from jengine import Runner, load_config
config = load_config("spirals/spirals.py", ["train_cfg.max_epochs=1", "model.module.widths=(2,)", "optim_wrapper.optimizer.lr=0.0"])
config.custom_hooks = [dict(type="BoatKitHook")]
config.val_evaluator = [dict(type="Accuracy"), dict(type="BoatKitMetric")]
config.load_from = "start.weights.json"
config.work_dir = "work"
runner = Runner.from_cfg(config)
runner.train()
print(json.dumps([runner.validations[-1][2], {f"{a}.{b}": x.tolist() for a, layer in runner.state.params.items() for b, x in layer.items()}]))
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "spirals", "boat_kit"]))
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with a new experiment, and a new package as an installation leaves it."""
    directory = tmp_path_factory.mktemp("new")
    write_project("spirals", "experiment", directory)
    write_project("boat_kit", "package", directory)
    info = directory / "boat_kit" / "boat_kit-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: boat-kit\nVersion: 0.1.0\n")
    (points,) = re.findall(r"^(\[project.entry-points.*?\n)\n", (directory / "boat_kit" / "pyproject.toml").read_text(), re.M | re.S)
    text = re.sub(r'\[project.entry-points."(.*)"\]', r"[\1]", points).replace('"', "")
    (info / "entry_points.txt").write_text(text)
    (directory / "start.weights.json").write_text(json.dumps(START))
    return directory


@pytest.fixture(scope="module")
def used(written, run_python):
    """The output of a process that uses all parts of the package in the experiment."""
    done = run_python(USE_ALL, cwd=written)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_of_a_new_package_runs_on_a_new_experiment(used):
    assert used.splitlines()[0] == "20 batches"


def test_the_hook_and_the_metric_of_a_new_package_act_in_a_run(used):
    metrics, _ = json.loads(re.search(r"^\[.*", used, re.M)[0])
    assert metrics.keys() == {"accuracy/top1", "confidence"}
    assert 1 / 3 < metrics["confidence"] < 1
    norm = np.sqrt(sum(np.square(x).sum() for x in START.values()))
    assert f"norm of the parameters: {norm:.3f}" in used


def test_the_reader_of_a_new_package_gives_a_run_its_start(used):
    _, params = json.loads(re.search(r"^\[.*", used, re.M)[0])
    assert params == START


def test_the_tests_of_what_is_written_pass(used):
    assert "3 passed" in used


def test_the_page_has_the_code_of_the_package(tmp_path):
    files = [path for path in write_project("my_name", "package", tmp_path) if path.parent == tmp_path / "my_name" / "my_name"]
    assert len(files) == 6
    for path in files:
        code = path.read_text()
        assert path.name == "__init__.py" or f"```python\n{code}```" in PAGES["house.md"], path


def test_the_command_prints_the_files_and_what_comes_next(run_python, tmp_path):
    done = run_python("from jengine.cli import main\nfor kind in ([], ['--package']): main(['new', f'a{len(kind)}', *kind])", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[:5] == [f"a0/{name}" for name in ("README.md", "a0.py", "data.py", "model.py", "test_a0.py")]
    assert [line for line in lines if line.startswith("next")] == ["next: jengine train a0/a0.py", "next: pip install -e a1"]
    assert all((tmp_path / line).is_file() for line in lines if not line.startswith("next"))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("my-net", "experiment", "`NAME` must be an identifier of Python, got 'my-net'; did you mean 'my_net'?"),
        ("../net", "experiment", "got '../net'; did you mean 'net'?"),
        ("class", "package", "`NAME` must be an identifier of Python, got 'class'"),
        ("", "package", "`NAME` must be an identifier of Python, got ''"),
        ("json", "experiment", "`NAME` must not be the name of an installed module, which it would hide, got 'json'"),
        ("optax", "package", "which it would hide, got 'optax'"),
        ("__main__", "package", "which it would hide, got '__main__'"),
        ("imix", "package", "`NAME` must not be the name of an extra of jengine, got 'imix'"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused_and_leaves_nothing(name, kind, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        write_project(name, kind, tmp_path)
    assert str(error.value).endswith(message)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_left_as_it_is(tmp_path):
    (tmp_path / "net").mkdir()
    with pytest.raises(FileExistsError, match="`NAME` must be the name of a new directory, .*net exists"):
        write_project("net", "experiment", tmp_path)
    assert list((tmp_path / "net").iterdir()) == []
