"""Test the pinned versions in constraints/, how `make` installs them, and the extras and versions that pages name."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import jengine

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted((ROOT / "constraints").glob("py*.txt"))
OLDEST = ROOT / "constraints" / "oldest.txt"
EXTRAS = PROJECT["optional-dependencies"]
INSTALL = (ROOT / "docs" / "install.md").read_text()


def _requirements(extra):
    """Return the requirements of the project and of an extra, including extras of the project that it references."""
    requirements = [Requirement(line) for line in PROJECT["dependencies"]]
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == PROJECT["name"]:
            requirements += [inner for name in sorted(requirement.extras) for inner in _requirements(name)]
        else:
            requirements.append(requirement)
    return {str(requirement): requirement for requirement in requirements}.values()


def _pins(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def _dry_run(tmp_path, tag, *arguments, target=".installed"):
    """Return the commands that `make` runs to install into an environment with Python `tag`, such as py312."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\necho {tag}\n")
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = [
        "make",
        "--dry-run",
        f"VENV={tmp_path}/venv",
        target if target == "demo" else f"{tmp_path}/venv/{target}",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout


def test_every_supported_python_has_a_constraints_file():
    prefix = "Programming Language :: Python :: 3."
    minors = [line.removeprefix(prefix) for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert [path.stem for path in FILES] == sorted(f"py3{minor}" for minor in minors)


@pytest.mark.parametrize("path", [*FILES, OLDEST], ids=lambda path: path.stem)
def test_pins_satisfy_every_requirement(path):
    pins = _pins(path)
    extras = ["dev", "interop"] if "torch" in pins else ["dev"]
    for requirement in (requirement for extra in extras for requirement in _requirements(extra)):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{path.name} does not pin {requirement}"
        assert pins[name] in requirement.specifier, (
            f"{path.name} pins {name}=={pins[name]}, but {requirement} is required"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_make_installs_the_pins_of_its_python_version(path, tmp_path):
    assert f"-e '.[dev]' -c constraints/{path.name}" in _dry_run(tmp_path, path.stem)


def test_the_tests_with_other_libraries_have_pins_and_an_environment_of_their_own(tmp_path):
    assert "torch" in _pins(ROOT / "constraints" / "py311.txt")
    assert "-e '.[dev,interop]' -c constraints/py311.txt" in _dry_run(tmp_path, "py311", "EXTRAS=dev,interop")


def test_the_demo_installs_only_what_its_config_requires_and_uses_the_environment_of_the_tests_if_it_is_there(tmp_path):
    installing = "-e '.[examples]' -c constraints/py311.txt"
    assert installing in _dry_run(tmp_path / "empty", "py311", target="demo")
    newer = tmp_path / "tested" / "venv" / ".installed"
    newer.parent.mkdir(parents=True)
    newer.touch()
    commands = _dry_run(tmp_path / "tested", "py311", target="demo")
    assert "pip install" not in commands
    assert "jengine train" in commands


def test_make_installs_the_newest_versions_on_request(tmp_path):
    assert " -c " not in _dry_run(tmp_path, FILES[0].stem, "PINS=").partition("pip install")[2]


def test_make_reports_a_python_without_pins_and_installs_the_newest(tmp_path):
    commands = _dry_run(tmp_path, "py399")
    assert f"tested with {' '.join(path.stem for path in FILES)}" in commands
    assert " -c " not in commands.partition("pip install")[2]


def test_the_oldest_versions_are_the_lower_bounds():
    pins = _pins(OLDEST)
    for requirement in _requirements("dev"):
        (bound,) = [Version(clause.version).release for clause in requirement.specifier if clause.operator == ">="]
        release = Version(pins[canonicalize_name(requirement.name)]).release
        assert release[: len(bound)] == bound, requirement


def test_versions_of_a_test_run_are_printed_before_it(tmp_path):
    script = ROOT / ".ci" / "versions.py"
    line = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert line.startswith(f"Python {sys.version.split()[0]}, jengine ")
    assert all(f", {name} " in line for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"))
    assert ".ci/versions.py" in _dry_run(tmp_path, FILES[0].stem, "pytest").partition("pytest -n")[0]


def test_a_python_that_is_not_supported_is_an_error_of_test_versions():
    command = [sys.executable, ROOT / ".ci" / "test_versions.py", "3.9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "unknown: 3.9; there are 3.11, 3.12, 3.13, 3.14, oldest, gpu-image\n"


def test_a_python_that_is_not_installed_is_named_and_fails(tmp_path):
    environment = {"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path)}
    command = [sys.executable, ROOT / ".ci" / "test_versions.py", "3.12", "oldest"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert re.findall(r"MISSING: .*python3.1\d", done.stdout) == ["MISSING: no python3.12", "MISSING: no python3.11"]


def _named_extras(text):
    in_brackets = re.findall(r"(?:jengine(?:-[\w.-]+\.whl)?|\.)\[([a-z0-9, -]+)\]", text)
    in_calls = re.findall(r'require_extra\("([\w-]+)"', text)
    in_classes = re.findall(r'^    extra = "([\w-]+)"', text, re.MULTILINE)
    return {name.strip() for names in [*in_brackets, *in_calls, *in_classes] for name in names.split(",")}


@pytest.mark.parametrize("directory", ["docs", "jengine", "benchmarks", "examples", "tests"])
def test_every_extra_that_a_page_or_a_message_names_exists(directory):
    paths = [path for suffix in ("*.py", "*.md") for path in sorted((ROOT / directory).rglob(suffix))]
    paths += sorted(ROOT.glob("*.md")) if directory == "docs" else []
    named = {extra: path.name for path in paths for extra in _named_extras(path.read_text())}
    assert {extra: name for extra, name in named.items() if extra not in EXTRAS} == {}
    assert named or directory in ("benchmarks", "examples")


def test_the_page_about_installing_describes_every_extra():
    table = INSTALL.partition("| extra | adds |")[2].partition("\n\n")[0]
    described = [
        name
        for line in table.splitlines()
        for name in re.findall(r"`([\w-]+)`", line.split("|")[1:2][0] if "|" in line else "")
    ]
    assert sorted(described) == sorted(EXTRAS)


@pytest.mark.parametrize("name", ["cuda12", "cuda13", "tpu"])
def test_an_accelerator_is_installed_by_the_extra_of_jax_with_its_name(name):
    assert EXTRAS[name] == [f"jax[{name}]"]


def test_the_page_about_installing_has_the_tested_versions():
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in INSTALL.partition("| package | oldest |")[2].partition("\n\n")[0].splitlines()[2:]
    ]
    pins = [_pins(ROOT / "constraints" / f"{stem}.txt") for stem in ("oldest", "py311", "py312")]
    assert rows == [[name, *(versions[name] for versions in pins)] for name, *_ in rows]
    assert [row[0] for row in rows] == [Requirement(line).name for line in PROJECT["dependencies"][:7]]
    jax_versions = [versions["jax"] for versions in pins]
    readme = (ROOT / "README.md").read_text()
    assert "JAX from {0} to {2} ({1} with Python 3.11)".format(*jax_versions) in readme
    core = {name: version for name, version in pins[2].items() if name in {row[0] for row in rows}}
    assert core.items() <= _pins(ROOT / "constraints" / "py313.txt").items()
    assert core.items() <= _pins(ROOT / "constraints" / "py314.txt").items()


def test_every_page_names_the_current_version():
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changes, flags=re.MULTILINE)[0] == jengine.__version__
    for page in (INSTALL, (ROOT / "README.md").read_text()):
        assert set(re.findall(r"jengine-([\d.]+)-py3", page)) == {jengine.__version__}
