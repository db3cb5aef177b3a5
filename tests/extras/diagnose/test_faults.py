"""Each planted fault is named, in the output of one command, with its layer, example, setting or line."""

import dataclasses
import pathlib
import re

import pytest

from jengine.cli import main
from tests.extras.diagnose.faults import DEBUG, FAULTS, MODELS, Fault, write_config

IN_PROCESS = [name for name, fault in FAULTS.items() if fault.says and not fault.is_about_processes]


def run(fault, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JENGINE_ON_RECOMPILE", "warn")
    (tmp_path / "config.py").write_text(write_config(fault))
    if fault.earlier:
        (tmp_path / "sound.py").write_text(write_config(dataclasses.replace(fault, changes=())))
        assert main(fault.earlier.split()) == 0
    main(fault.command.split())
    said = capsys.readouterr()
    return said.out + said.err


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_planted_fault_is_named(tmp_path, monkeypatch, capsys, name):
    said = run(FAULTS[name], tmp_path, monkeypatch, capsys)
    for words in FAULTS[name].says:
        assert re.search(words, said), said


@pytest.mark.parametrize("model", MODELS)
def test_a_sound_model_has_no_silent_faults(tmp_path, monkeypatch, capsys, model):
    said = run(Fault(model, (), command=DEBUG), tmp_path, monkeypatch, capsys)
    assert "Everything worked" in said
    assert "look at these first" not in said
    assert "The learning rate is 0" not in said


def test_the_page_about_faults_has_a_row_for_each():
    page = (pathlib.Path(__file__).parents[3] / "docs" / "faults.md").read_text()
    assert [name for name in FAULTS if f"| {name} |" not in page] == []
