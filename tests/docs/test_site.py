"""Build the site, which fails on a broken link or anchor, and check what it contains; in `make processes`, as `make docs` builds it too."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.extras.report.browser import BROWSER, open_page

is_missing = importlib.util.find_spec("sphinx_book_theme") is None
pytestmark = [pytest.mark.many_processes, pytest.mark.skipif(is_missing, reason="needs sphinx_book_theme")]

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the directory of the built site; test_notebooks.py runs the notebooks."""
    directory = tmp_path_factory.mktemp("site")
    sources, pages = directory / "docs", directory / "site"
    # navigation bars that list every object on every page take a quarter of the time, and no link of a page is in them
    quick = ["nb_execution_mode=off", "toc_object_entries=0", "html_theme_options.collapse_navigation=1"]
    options = [argument for setting in quick for argument in ("-D", setting)]
    sphinx = ["-m", "sphinx", "-W", "--keep-going", "-q", *options, "-c", "docs", sources, pages]
    for arguments in (["docs/_gen/site_pages.py", sources], sphinx):
        command, environment = [sys.executable, *map(str, arguments)], {**os.environ, "XLA_FLAGS": ""}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return pages


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


def test_hooks_arguments_and_functions_have_sections(site):
    hooks = (site / "reference" / "hooks.html").read_text()
    section = re.search(r'<section id="emahook">.*?</section>', hooks, flags=re.S)[0]
    assert "begin_epoch" in section
    assert 'id="jengine.runner.Runner"' in (site / "api" / "runner.html").read_text()


def test_no_table_or_list_is_left_as_text(site):
    for path in site.rglob("*.html"):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        paragraphs = re.findall(r"<p>(.*?)</p>", text, flags=re.DOTALL)
        assert [p for p in paragraphs if re.search(r"^\s*(\||[-*] |\d+\. )", p, flags=re.MULTILINE)] == [], path


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
def test_no_page_is_wider_than_a_phone(site, tmp_path):
    wider = "while (document.readyState !== 'complete') await new Promise(done => setTimeout(done, 20));"
    wider += "return document.documentElement.scrollWidth - innerWidth;"
    pages = ["index", "optim", "how_do_i", "changelog", "examples", "genindex", "api/train", "reference/wrappers"]
    with open_page(site / "index.html", tmp_path / "profile", width=390, height=844) as page:
        for name in pages:
            page.open(site / f"{name}.html", width=390, height=844)
            assert page.run(wider) <= 0, name
        assert page.run("return document.querySelector('link[rel=icon]').href").endswith("favicon.svg")


def test_the_search_knows_the_page_of_the_runner(site):
    index = (site / "searchindex.js").read_text().removeprefix("Search.setIndex(").rstrip(")")
    assert "Runner" in [entry[-1] for entry in json.loads(index)["objects"]["jengine.runner"]]


def test_the_menu_has_three_tiers(site):
    index = (site / "index.html").read_text()
    assert re.findall(r'class="caption-text">([^<]*)<', index)[:3] == ["Start", "Guides", "In depth"]
    assert "Author name not set" not in index
