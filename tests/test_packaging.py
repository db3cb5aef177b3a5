"""Test the pinned versions in constraints/, and how `make` installs them."""

import os
import pathlib
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted((ROOT / "constraints").glob("*.txt"))


def _requirements(extra):
    """Return the requirements of the project and of an extra, including extras of the project that it references."""
    requirements = [Requirement(line) for line in PROJECT["dependencies"]]
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == PROJECT["name"]:
            requirements += [inner for name in sorted(requirement.extras) for inner in _requirements(name)]
        else:
            requirements.append(requirement)
    return {str(requirement): requirement for requirement in requirements}.values()


def _pins(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def _dry_run(tmp_path, tag, *arguments):
    """Return the commands that `make` runs to install into an environment with Python `tag`, such as py312."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho {tag}\n")
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", f"VENV={tmp_path}/venv", f"{tmp_path}/venv/.installed", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout


def test_every_supported_python_has_a_constraints_file():
    prefix = "Programming Language :: Python :: 3."
    minors = [line.removeprefix(prefix) for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert [path.stem for path in FILES] == sorted(f"py3{minor}" for minor in minors)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
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


def test_make_installs_the_newest_versions_on_request(tmp_path):
    assert " -c " not in _dry_run(tmp_path, FILES[0].stem, "PINS=").partition("pip install")[2]


def test_make_reports_a_python_without_pins_and_installs_the_newest(tmp_path):
    commands = _dry_run(tmp_path, "py399")
    assert f"tested with {' '.join(path.stem for path in FILES)}" in commands
    assert " -c " not in commands.partition("pip install")[2]
