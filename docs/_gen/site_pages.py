"""Write the sources of the documentation site: the pages of docs/, and those that are generated.

python docs/_gen/site_pages.py build/docs && python -m sphinx -W -c docs build/docs build/site
"""

import ast
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable, Iterator

import api_pages
import registry_pages

ROOT = pathlib.Path(__file__).parents[2]
# Pages of the site that are files outside docs/.
OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
}
# The three tiers of the menu. A group of pages is one entry, which opens.
START = ["overview", "install", "start", "how_do_i", "coming_from", "notebooks", "examples"]
GUIDES = [
    "config",
    "model",
    "data",
    "optim",
    "schedules",
    "evaluation",
    "hooks",
    "checkpoints",
    "runner",
    "logging",
    "visualization",
    "report",
    "sweeps",
    "before",
    "faults",
    "predict",
    "pretrained",
    "finetuning",
    "devices",
]
_NOTEBOOKS = sorted(
    f"notebooks/{path.stem}" for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")
)
GROUPS = {
    "Tutorials": ["optim_tutorial", *_NOTEBOOKS],
    "Training techniques": [],  # all pages that no other group and no tier has
    "Many devices": ["processes", "scale", "plan", "storage", "speed"],
    "Fields": ["language", "rl", "segmentation", "selfsup", "imix"],
    "From other trainers": ["mmengine", "comparison", "features"],
    "Reference": ["reference/index", "api/index", "public_names"],
    "Project": ["house", "benchmarks", "results", "contributing", "agents", "changelog"],
}


def write_sources(directory: pathlib.Path) -> None:
    """Write all pages of the site into a directory, which is emptied first."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(
        ROOT / "docs", directory, ignore=shutil.ignore_patterns("_gen", "conf.py", "*.md")
    )
    shutil.copytree(ROOT / "examples" / "notebooks", directory / "notebooks")
    for name, text in _write_pages():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _write_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page."""
    pages = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
    for page in pages:
        yield f"{page}.md", _link((ROOT / "docs" / f"{page}.md").read_text())
    for path, name in OUTSIDE.items():  # as pages of docs/, with the links that those would have
        text = re.sub(r"\[docs/(\w+\.md)\]", r"[\1]", (ROOT / path).read_text())
        text = re.sub(r"\A# jengine\n", "# Overview\n", text)  # the first page has that title
        yield (
            name,
            _link(
                re.sub(
                    r"\]\((?!https?:|#)(docs/)?", lambda link: "](" if link[1] else "](../", text
                )
            ),
        )
    yield "examples.md", _write_examples()
    for name, reference in registry_pages.PAGES.items():
        yield f"reference/{name}.md", registry_pages.write_page(reference)
    for name in api_pages.PACKAGES:
        yield f"{_api_path(name)}.md", api_pages.write_page(name)
    yield "reference/index.md", _write_contents("Config reference", list(registry_pages.PAGES))
    yield (
        "api/index.md",
        _write_contents(
            "Python API", [_api_path(name).removeprefix("api/") for name in api_pages.PACKAGES]
        ),
    )
    groups = list_groups(pages)
    for title, members in groups.items():
        yield f"{_group_path(title)}.md", _write_contents(title, [f"/{page}" for page in members])
    tiers = {"Start": START, "Guides": GUIDES, "In depth": [_group_path(title) for title in groups]}
    trees = [_write_tree(pages, f":caption: {title}\n:hidden:\n") for title, pages in tiers.items()]
    yield "index.md", "\n".join([(ROOT / "docs" / "_gen" / "index.md").read_text(), *trees])


def list_groups(pages: Iterable[str]) -> dict[str, list[str]]:
    """Return the pages of each group in the third tier, the given pages of docs/ among them."""
    placed = {*START, *GUIDES, *(page for members in GROUPS.values() for page in members)}
    others = [page for page in pages if page not in placed]
    return {title: members or others for title, members in GROUPS.items()}


def _link(text: str) -> str:
    """Show titles instead of file names in links, and find the place of files of the repository
    on the site.
    """
    text = re.sub(r"\]\(\.\./(examples|configs)/(\w+)\.py\)", r"](examples.md#\1-\2)", text)
    text = re.sub(r"\]\(\.\./(examples/launch)/(\w+)\.\w+\)", r"](examples.md#launch-\2)", text)
    text = re.sub(r"\]\(\.\./examples/notebooks/(\w+\.ipynb)\)", r"](notebooks/\1)", text)
    text = re.sub(r"\[(\w+)\.md\]\(\1\.md", lambda link: f"[{_title(link[1])}]({link[1]}.md", text)
    for path, name in OUTSIDE.items():
        text = text.replace(f"](../{path})", f"]({name})")
    return text


def _title(page: str) -> str:
    """Return the title of a page of docs/, its first line."""
    return (ROOT / "docs" / f"{page}.md").read_text().partition("\n")[0].removeprefix("# ")


def _write_examples() -> str:
    """Return the page with the sources of `configs/` and `examples/`, all of which the tests
    train.
    """
    lines = [
        "# Examples",
        "",
        "Complete config files and scripts. The tests train all configs and scripts.",
        "",
    ]
    for directory, title in (
        ("configs", "Config files"),
        ("examples", "Scripts"),
        ("examples/launch", "Launch files"),
    ):
        lines += [f"## {title}", ""]
        for path in sorted((ROOT / directory).glob("*.*")):
            source = path.read_text()
            language = {".py": "python", ".sh": "bash", ".yaml": "yaml"}.get(path.suffix)
            if language is None:
                continue
            is_python = language == "python"
            docstring = (
                (ast.get_docstring(ast.parse(source)) or "")
                if is_python
                else source.split("# ", 2)[1]
            )
            summary = docstring.split("\n\n")[0].split("\n#")[0].replace("\n", " ")
            lines += [
                f"({directory.rpartition('/')[2]}-{path.stem})=",
                "",
                f"### {directory}/{path.name}",
                "",
            ]
            lines += [summary, "", f"```{language}", source.rstrip(), "```", ""]
    return "\n".join(lines)


def _write_contents(title: str, pages: list[str]) -> str:
    return f"# {title}\n\n{_write_tree(pages, ':maxdepth: 1')}"


def _write_tree(pages: list[str], options: str) -> str:
    return "\n".join(["```{toctree}", options.rstrip(), "", *pages, "```", ""])


def _group_path(title: str) -> str:
    return f"groups/{title.lower().replace(' ', '_')}"


def _api_path(name: str) -> str:
    return f"api/{name.removeprefix('jengine.')}"


if __name__ == "__main__":
    write_sources(pathlib.Path(sys.argv[1]))
