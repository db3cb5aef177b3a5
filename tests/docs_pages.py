"""Run the code of the pages, and check the runs that it leaves."""

import pathlib
import re
import sys
import types
from types import SimpleNamespace

from jengine.config import (
    HOOKS,
    LOOPS,
    METRICS,
    MODELS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    VISBACKENDS,
    VISUALIZERS,
)
from jengine.train import AVERAGES
from tests.run_again import check_runs_of_page

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
TEXTS = {**PAGES, **{name: (ROOT / name).read_text() for name in ("AGENTS.md", "README.md")}}
REGISTRIES = (AVERAGES, HOOKS, LOOPS, METRICS, MODELS, OPTIMIZERS, PARAM_SCHEDULERS, VISBACKENDS, VISUALIZERS)


def blocks_of(page, language):
    """Return the code blocks of a page in a language."""
    return [m[1] for m in re.finditer(rf"^```{language}\n(.*?)^```", TEXTS[page], flags=re.DOTALL | re.MULTILINE)]


def page_runner(directory, monkeypatch):
    """Yield a function that runs the blocks of a page in an empty directory and returns their names; see `run_page`."""
    monkeypatch.chdir(directory)
    for registry in REGISTRIES:
        for name in registry:
            registry.get(name)  # imports the extra that has it: once, so its entry must stay
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))  # removes those of the page afterwards
    pages = {}

    def run(page, names=None, before=None, skipped=(), replace=("", ""), only=None):
        module = types.ModuleType(f"docs.{page.removesuffix('.md')}")  # so that configs can name what it defines
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.config = SimpleNamespace()
        module.__dict__.update(names or {})
        names = vars(module)
        for block in blocks_of(page, "python"):
            is_foreign = re.match(r"import (haiku|qwix)\b", block)  # tests of these run it where they are installed
            if block in skipped or (is_foreign if only is None else not only(block)):
                continue
            names.update((before or {}).get(block.split("\n")[0], {}))
            exec(compile(block.replace(*replace), page, "exec"), names)
        pages[page] = only is None
        return names

    yield run
    for page, is_whole in pages.items():
        check_runs_of_page(page, directory, is_whole)
