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


def test_tab_help_and_import_star_show_the_names(run_python):
    code = (
        "import jengine, pydoc\nfrom jengine import *\n"
        "print({'Runner', 'load_config', 'load_model', 'hooks'} <= set(dir(jengine)), Runner.__name__,"
        " 'logging' in vars(), 'class Runner' in pydoc.render_doc(jengine, renderer=pydoc.plaintext))"
    )
    done = run_python(code)
    assert done.stdout.split() == ["True", "Runner", "False", "True"], done.stderr
