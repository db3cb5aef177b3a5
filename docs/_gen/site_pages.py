"""Add the generated pages to the site: the overview, the examples, the measured results and the reference."""

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import api_pages
import registry_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[2]
# Pages of the site that are files outside docs/.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated reference and the pages that are not listed to the navigation."""
    sections = {title: pages for section in config.nav for title, pages in section.items()}
    listed = [page for pages in sections.values() for page in pages if isinstance(page, str)]
    sections["How-tos"] += sorted({path.name for path in (ROOT / "docs").glob("*.md")}.difference(listed))
    reference = sections["Reference"]
    reference += [{page.title: f"reference/{name}.md"} for name, page in registry_pages.PAGES.items()]
    reference.append({"Python API": [{name: _api_path(name)} for name in api_pages.PACKAGES]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, text in _generate():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Show titles instead of file names in links, and find the place of files of the repository on the site."""
    markdown = re.sub(r"\]\(\.\./(examples|configs)/(\w+)\.py\)", r"](examples.md#\1-\2)", markdown)
    markdown = re.sub(r"\[(\w+)\.md\]\(\1\.md", lambda link: f"[{_title(link[1])}]({link[1]}.md", markdown)
    for path, name in OUTSIDE.items():
        markdown = markdown.replace(f"](../{path})", f"]({name})")
    return markdown


def _generate() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each generated page."""
    for path, name in OUTSIDE.items():  # as pages of docs/, with the links that those would have
        text = re.sub(r"\[docs/(\w+\.md)\]", r"[\1]", (ROOT / path).read_text())
        yield name, re.sub(r"\]\((?!https?:|#)(docs/)?", lambda link: "](" if link[1] else "](../", text)
    yield "examples.md", _write_examples()
    for name, page in registry_pages.PAGES.items():
        yield f"reference/{name}.md", registry_pages.write_page(page)
    for name in api_pages.PACKAGES:
        yield _api_path(name), api_pages.write_page(name)


def _title(page: str) -> str:
    """Return the title of a page of docs/, its first line."""
    return (ROOT / "docs" / f"{page}.md").read_text().partition("\n")[0].removeprefix("# ")


def _write_examples() -> str:
    """Return the page with the sources of `configs/` and `examples/`, all of which the tests train."""
    lines = ["# Examples", "", "Complete config files and scripts. The tests train all of them.", ""]
    for directory, title in (("configs", "Config files"), ("examples", "Scripts")):
        lines += [f"## {title}", ""]
        for path in sorted((ROOT / directory).glob("*.py")):
            source = path.read_text()
            summary = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ")
            lines += [f"### {directory}/{path.name} {{ #{directory}-{path.stem} }}", "", summary, ""]
            lines += ["```python", source.rstrip(), "```", ""]
    return "\n".join(lines)


def _api_path(name: str) -> str:
    return f"api/{name.removeprefix('jengine.')}.md"
