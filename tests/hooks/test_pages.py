"""Run the pages on segmentation and on iMIX from top to bottom."""

import pathlib
import re

import pytest

from jengine.registry import HOOKS

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"


@pytest.mark.parametrize("page", ["segmentation.md", "imix.md"])
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    assert "HookBase" not in HOOKS  # the first lookup fills the registry
    monkeypatch.setattr(HOOKS, "_entries", dict(HOOKS._entries))  # removes the registrations of a page afterwards
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL):
        if not block.startswith("config."):  # a part of a config file
            exec(compile(block, page, "exec"), names)
    assert (tmp_path / "work_dirs").exists()
