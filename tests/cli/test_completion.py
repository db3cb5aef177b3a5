"""Test shell completion, and the versions for bug reports."""

import importlib.metadata
import shutil
import signal
import subprocess
import sys

import pytest

import jengine
from jengine.cli import main


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "jengine.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], "train"),
        (["train", "--res"], "--resume"),
        (["train", "my_con"], "my_config.py"),
        (["train", "my_config.py", "--work-dir", "ru"], "runs"),
        (["ckpt", "sh"], "show"),
        (["completion", "f"], "fish"),
    ],
)
def test_bash_completes_commands_options_and_paths(bash_script, tmp_path, words, expected):
    (tmp_path / "my_config.py").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "rules.txt").touch()  # is not a directory
    # what bash does at the key Tab
    complete = 'source "$0"; COMP_WORDS=(jengine "$@"); COMP_CWORD=$#; _shtab_jengine jengine "${@: -1}"; echo "${COMPREPLY[@]}"'
    command = ["bash", "-c", complete, str(bash_script), *words]
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert out.stdout.strip() == expected


@pytest.mark.parametrize(
    ("shell", "line"),
    [("zsh", "#compdef jengine"), ("fish", "complete -c jengine -n '_shtab_jengine_using ckpt; and")],
)
def test_other_shells_have_scripts(capsys, shell, line):
    assert main(["completion", shell]) == 0
    assert line in capsys.readouterr().out


def test_the_version_has_libraries_and_devices(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"jengine {jengine.__version__}"
    for package in ("jax", "flax", "optax", "orbax-checkpoint"):
        assert f"{package} {importlib.metadata.version(package)}" in lines
    assert lines[-1] == "devices: 8 x cpu"


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "jengine", "completion", "bash"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # as `| head` does
    assert (process.wait(60), process.stderr.read()) == (128 + signal.SIGPIPE, "")
    process.stderr.close()
