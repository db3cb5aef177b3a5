"""Settings of the documentation site; `make docs` builds it from the pages that `docs/_gen/site_pages.py` writes."""

import pathlib
import re
import sys
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jengine  # noqa: E402

project = "jengine"
version = release = jengine.__version__
html_title = f"jengine {version}"
html_theme = "sphinx_book_theme"
html_static_path = ["assets"]
html_css_files = ["site.css"]
html_favicon = "assets/favicon.svg"
html_copy_source = html_show_copyright = html_show_sourcelink = False
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
    "navbar_persistent": [],  # the sidebar has the search
    "footer_content_items": ["extra-footer"],
    "extra_footer": f"jengine {version}, a training engine for JAX",
}
# Every page links to the repository once pyproject.toml has its address: `urls = {Repository = "https://..."}`.
if url := tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository"):
    html_theme_options |= {"repository_url": url, "use_repository_button": True}

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
myst_enable_extensions = ["attrs_block", "colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "force"  # a notebook that fails stops the build
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

default_role = "literal"  # docstrings write `name`, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_param = napoleon_use_rtype = False
suppress_warnings = ["myst.xref_ambiguous"]


def _separate_plurals(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Separate a name from letters that follow it, as in `jax.Array`s, which Markdown needs not but docutils does."""
    lines[:] = [re.sub(r"`[^`]+`(?=(\w?))", lambda name: name[0] + "\\ " * bool(name[1]), line) for line in lines]


def setup(app: Any) -> None:
    """Register the change of docstrings."""
    app.connect("autodoc-process-docstring", _separate_plurals)
