"""Run the page on iMIX from top to bottom."""

import pathlib
import re

import pytest

from jengine.registry import HOOKS

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"


def test_page_on_imix_runs_from_top_to_bottom(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    assert "HookBase" not in HOOKS  # the first lookup fills the registry
    monkeypatch.setattr(HOOKS, "_entries", dict(HOOKS._entries))  # removes the registrations of a page afterwards
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "imix.md").read_text(), flags=re.DOTALL):
        exec(compile(block, "imix.md", "exec"), names)
    assert (tmp_path / "work_dirs").exists()
