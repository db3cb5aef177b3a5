"""Check that the page of public names and the package agree."""

import importlib
import inspect
import pathlib
import re

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "public_names.md").read_text()
ROWS = {row[0]: re.findall(r"`(\w+)`", row[1]) for row in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", PAGE, re.M)}


def test_every_public_name_can_be_imported_and_is_documented():
    for module, names in ROWS.items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            assert inspect.getdoc(value), (module, name)


def test_there_are_about_sixty():
    assert 50 <= sum(map(len, ROWS.values())) <= 80
    assert "Runner" in ROWS["jengine"]
