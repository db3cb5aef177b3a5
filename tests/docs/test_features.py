"""Check that the names on the page of features exist, and that its counts are those of its rows."""

import collections
import importlib
import re

import jengine
from jengine.cli.main import build_parser
from jengine.config import Registry, registry
from jengine.config.plugins import list_extras
from tests.docs_pages import PAGES

TABLES, COUNTS = PAGES["features.md"].split("## Counts")
ROWS = re.findall(r"^\| (?!feature )(.+?) \| (.+) \| .+ \|$", TABLES, re.M)
OF_OTHERS = {"StatefulDataLoader"}  # what jengine takes from other libraries


def find_names():
    """Return the registered names, and the public ones of all rooms and extras."""
    pages = [jengine, *(getattr(jengine, room) for room in dir(jengine) if room.islower())]
    pages += [importlib.import_module(f"jengine.extras.{extra}") for extra in list_extras()]
    registries = [value for value in vars(registry).values() if isinstance(value, Registry)]
    return {name for names in [*map(dir, pages), *registries] for name in names}


def test_names_on_the_page_of_features_exist():
    names, missing = find_names(), []
    commands = re.findall(r"^    ([\w-]+)", build_parser().format_help(), re.M)
    for _, cell in ROWS:
        shown = "".join(PAGES[page] for page in re.findall(r"\]\((\w+\.md)", cell))
        for name in re.findall(r"`([^`]+)`", cell):
            if name.startswith("jengine "):
                _, command, *options = name.split()
                exists = command in commands and all(option in shown for option in options)
            elif re.fullmatch("[A-Z][A-Za-z0-9]+", name) and name not in OF_OTHERS:
                exists = name in names
            else:
                exists = name in names or re.search(rf"(?<!\w){re.escape(name)}(?!\w)", shown)
            missing += [] if exists else [name]
    assert missing == []


def test_a_feature_that_jengine_has_is_named_with_its_page():
    owned = [cell for _, cell in ROWS if not cell.startswith(("partly:", "no:"))]
    assert [cell for cell in owned if not re.search(r"`.*\]\(\w+\.md", cell)] == []
    assert len({feature for feature, _ in ROWS}) == len(ROWS)


def test_counts_of_features_are_those_of_the_rows():
    count = collections.Counter(cell.split(":")[0] for _, cell in ROWS)
    full = len(ROWS) - count["partly"] - count["no"]
    text = f"{len(ROWS)} rows jengine has {full} in full, {count['partly']} in part, and {count['no']} not"
    assert text in COUNTS
