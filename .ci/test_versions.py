"""Try what the README says with each supported Python, and the tests with the oldest packages.

    make test-versions                      # all of them
    make test-versions ARGS="3.13 oldest"   # only these
    make test-versions ARGS="gpu-image"     # only what a machine with a GPU has: see
    constraints/gpu-image.txt

The wheel trains the demo in an environment from scratch; then `make demo` and `make test` run in
.venv-NAME. With the oldest packages only the tests run there, not the linter and the type checker.
The table at the end has a line for each; an interpreter that is not found counts as a failure.
Interpreters are `python3.13` and the like, or pyenv's.
"""

import glob
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).parent.parent
_PREFIX = "Programming Language :: Python :: 3."
_CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
PYTHONS = [f"3.{line.removeprefix(_PREFIX)}" for line in _CLASSIFIERS if line.startswith(_PREFIX)]
OLDEST = "oldest"
GPU_IMAGE = "gpu-image"


def find_python(version: str) -> str | None:
    """Return an interpreter of this version that can make environments, or None."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python")),
    ]
    code = f"import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for path in filter(None, candidates):
        if subprocess.run([path, "-c", code], capture_output=True).returncode == 0:
            return path
    return None


def train_demo(python: str, environment: pathlib.Path, pins: str) -> bool:
    """Install the wheel into an empty environment and train the demo in an empty directory."""
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        venv = pathlib.Path(folder, "venv")
        build = [
            environment / "bin" / "python",
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            directory,
            ROOT,
        ]
        if not (run(*build) and run(python, "-m", "venv", venv)):
            return False
        (wheel,) = directory.glob("*.whl")
        install = [
            venv / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        (directory / "empty").mkdir()
        return run(*install, f"{wheel}[examples]", "-c", ROOT / pins) and run(
            venv / "bin" / "jengine", "train", "configs/digits_cnn.py", cwd=directory / "empty"
        )


def check_gpu_image() -> list[str]:
    """Run the suite for accelerators on the CPU with the packages of a GPU machine, where
    jengine is not installed.
    """
    python = find_python("3.12")
    if python is None:
        return [GPU_IMAGE, "MISSING: no python3.12 on PATH or in pyenv", "", "", ""]
    start = time.monotonic()
    environment = ROOT / f".venv-{GPU_IMAGE}"
    pip = [
        environment / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    if not (
        run(python, "-m", "venv", environment)
        and run(*pip, "-r", ROOT / f"constraints/{GPU_IMAGE}.txt")
    ):
        return [GPU_IMAGE, python, "FAILED to install", "", ""]
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["JAX_PLATFORMS"] = "cpu"
    suite = run(
        environment / "bin" / "python", "-m", "benchmarks.accelerator", "--tiny", "--minutes", "20"
    )
    minutes = (time.monotonic() - start) / 60
    return [GPU_IMAGE, python, f"suite {'passed' if suite else 'FAILED'}", "", f"{minutes:.0f} min"]


def run(*command: object, cwd: pathlib.Path = ROOT) -> bool:
    """Run a command and return whether it succeeded."""
    print("$", *command, flush=True)
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run([str(part) for part in command], cwd=cwd, env=variables).returncode == 0


def check(name: str) -> list[str]:
    """Run everything for a Python version, `oldest` or `gpu-image`, and return the line of the
    table.
    """
    if name == GPU_IMAGE:
        return check_gpu_image()
    version = PYTHONS[0] if name == OLDEST else name
    python = find_python(version)
    if python is None:
        return [name, f"MISSING: no python{version} on PATH or in pyenv", "", "", ""]
    environment = ROOT / f".venv-{name}"
    pins = (
        f"constraints/{OLDEST}.txt"
        if name == OLDEST
        else f"constraints/py{version.replace('.', '')}.txt"
    )
    arguments = [f"PYTHON={python}", f"VENV={environment.name}", f"PINS={pins}"]
    start = time.monotonic()
    if not run("make", f"{environment.name}/.installed", *arguments):
        return [name, python, "FAILED to install", "", ""]
    wheel = "passed" if train_demo(python, environment, pins) else "FAILED"
    targets = ("pytest",) if name == OLDEST else ("demo", "test")
    results = [
        f"{target} {'passed' if run('make', target, *arguments) else 'FAILED'}"
        for target in targets
    ]
    return [
        name,
        python,
        f"wheel {wheel}",
        " ".join(results),
        f"{(time.monotonic() - start) / 60:.0f} min",
    ]


def main(names: list[str]) -> int:
    """Run all checks, print the table, and return the exit code."""
    known = [*PYTHONS, OLDEST, GPU_IMAGE]
    unknown = set(names) - set(known)
    if unknown:
        print(
            f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr
        )
        return 2
    lines = [check(name) for name in names or known]
    for line in lines:
        print(*(f"{cell:<10}" for cell in line))
    return int(
        any("FAILED" in cell or cell.startswith("MISSING") for line in lines for cell in line)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
