"""Build the site, which fails on a broken link or anchor, and check what it contains."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("material")

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the directory of the built site."""
    directory = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "XLA_FLAGS": "", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_every_page_of_the_documentation_is_on_the_site(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}


def test_nothing_is_loaded_from_the_network(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="?(https?:[^" >]*)', path.read_text())
        loaded += re.findall(
            r'<link[^>]* rel="?(?:stylesheet|preconnect|icon)"?[^>]* href="?(https?:[^" >]*)', path.read_text()
        )
        assert loaded == [], path


def test_search_finds_hooks_arguments_and_functions(site):
    documents = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    locations = {document["location"]: document["text"] for document in documents}
    assert "begin_epoch" in locations["reference/hooks.html#emahook"]
    assert "api/runner.html#jengine.runner.Runner" in locations


def test_no_table_or_list_is_left_as_text(site):
    for path in site.rglob("*.html"):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        paragraphs = re.findall(r"<p>(.*?)</p>", text, flags=re.DOTALL)
        assert [p for p in paragraphs if re.search(r"^\s*(\||[-*] |\d+\. )", p, flags=re.MULTILINE)] == [], path
