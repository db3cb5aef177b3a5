"""Build the distributions, install the wheel, and train with it where there is no repository."""

import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

import jengine

ROOT = pathlib.Path(__file__).parent.parent

pytest.importorskip("build", reason="building requires jengine[test]")
pytest.importorskip("hatchling", reason="building requires jengine[test]")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Return the paths of the source distribution and of the wheel that is built from it."""
    directory = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT)
    (source,), (wheel,) = directory.glob("*.tar.gz"), directory.glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def site(distributions, tmp_path_factory):
    """Return a directory with the installed wheel, without its dependencies."""
    directory = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile"]
    _run(*pip, "--target", directory, distributions[1])
    return directory


def _run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_wheel_has_the_package_and_the_configs_and_nothing_else(distributions):
    _, wheel = distributions
    assert wheel.name == f"jengine-{jengine.__version__}-py3-none-any.whl"
    files = set(zipfile.ZipFile(wheel).namelist())
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "jengine").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    configs = {f"jengine/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert {name for name in files if ".dist-info/" not in name} == package | configs
    assert {"jengine/py.typed", "jengine/__init__.pyi", "jengine/configs/digits_cnn.py"} <= files


def test_the_source_distribution_has_what_make_test_needs(distributions):
    source, _ = distributions
    with tarfile.open(source) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "pyproject.toml", "constraints/py311.txt", "tests/conftest.py", "docs/start.md"} <= files
    assert not [name for name in files if name.startswith((".venv", ".cache", ".git/", "work_dirs"))]


def test_the_installed_wheel_trains_the_demo_in_an_empty_directory(site, tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("tensorboard")
    command = [site / "bin" / "jengine", "train", "configs/digits_cnn.py"]
    changes = [
        "--config.train_cfg.max_epochs=1",
        "--config.train_dataloader.num_batch_per_epoch=3",
        "--config.train_cfg.val_interval=1",
    ]
    done = _run(*command, *changes, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)})
    assert (
        "configs/digits_cnn.py does not exist in this directory; using the config of this name that jengine ships."
        in done.stderr
    )
    assert "accuracy/top1: " in done.stdout + done.stderr
    assert (tmp_path / "work_dirs" / "digits_cnn" / "last_checkpoint").is_file()
