"""Each planted fault is named, in the output of one command, with its layer, example, setting or line."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest

from jengine.cli import main
from jengine.extras.diagnose import progress_watch
from tests.extras.diagnose.faults import DEBUG, FAULTS, MODELS, Fault, write_config
from tests.parallel.test_processes import PATIENCE, address, environment

# those that compile each operation take a minute: `make processes` has them
LONG = ("--check", "--debug")
IN_PROCESS = [
    pytest.param(name, marks=[pytest.mark.many_processes] if fault.processes or any(word in fault.command for word in LONG) else [])
    for name, fault in FAULTS.items()
    if fault.says
]


def run(fault, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JENGINE_ON_RECOMPILE", "warn")
    monkeypatch.setattr(progress_watch, "LIMIT", 2.0)
    (tmp_path / "config.py").write_text(write_config(fault))
    if fault.earlier:
        (tmp_path / "sound.py").write_text(write_config(dataclasses.replace(fault, changes=())))
        assert main(fault.earlier.split()) == 0
    if fault.processes:
        return run_processes(fault)
    main(fault.command.split())
    said = capsys.readouterr()
    return said.out + said.err


def run_processes(fault):
    env = {**environment(1), "JENGINE_FAILURE_TIMEOUT": "5"}
    command = [sys.executable, "-m", "jengine", *fault.command.split()]
    if fault.processes > 1:
        command += ["--coordinator", address(), "--num-processes", str(fault.processes)]
    processes = []
    for index in range(fault.processes):
        own = ["--process-id", str(index)] if fault.processes > 1 else []
        processes.append(subprocess.Popen([*command, *own], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        return "".join(process.communicate(timeout=PATIENCE)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_planted_fault_is_named(tmp_path, monkeypatch, capsys, name):
    said = run(FAULTS[name], tmp_path, monkeypatch, capsys)
    for words in FAULTS[name].says:
        assert re.search(words, said), said


@pytest.mark.many_processes
@pytest.mark.parametrize("model", MODELS)
def test_a_sound_model_has_no_silent_faults(tmp_path, monkeypatch, capsys, model):
    said = run(Fault(model, (), command=DEBUG), tmp_path, monkeypatch, capsys)
    assert "Everything worked" in said
    assert "look at these first" not in said
    assert "The learning rate is 0" not in said


COMMANDS = {"train config.py": "plain", "train config.py --check": "`--check`", "train config.py --debug": "`--debug`", "data config.py": "`jengine data CONFIG`"}


def test_the_page_about_faults_is_the_table_of_those_that_are_planted():
    page = (pathlib.Path(__file__).parents[3] / "docs" / "faults.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| (?!fault|-)", line)]
    listed = {name: (model, command.partition(",")[0], where) for name, model, command, where, *_ in rows}
    assert listed == {name: (fault.model, COMMANDS[fault.command], fault.where) for name, fault in FAULTS.items()}
    in_code = [fault for fault in FAULTS.values() if set(fault.where.split(", ")) & {"layer", "example", "line"}]
    assert len(in_code) >= 36


@pytest.mark.many_processes
def test_two_processes_check_their_step_together_and_name_the_example(tmp_path, monkeypatch, capsys):
    one = FAULTS["an example with an infinite value"]
    said = run(dataclasses.replace(one, processes=2), tmp_path, monkeypatch, capsys)
    assert said.count("in the step of iteration 1, for example 10 of the batch, in the layer stem, at ") >= 2
