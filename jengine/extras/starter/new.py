"""`jengine new`: an experiment, or a package with parts for jengine, from the templates here."""

import argparse
import keyword
import pathlib
import re
import shutil
from collections.abc import Sequence

from jengine.config.errors import ConfigError
from jengine.config.modules import is_free
from jengine.config.plugins import list_extras

_TEMPLATES = pathlib.Path(__file__).parent / "templates"
_NEXT = {
    "experiment": "jengine train {name}/{name}.py",
    "package": "pip install -e {name}",
}


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Write the files, and print them with the command that comes next."""
    kind = "package" if args.package else "experiment"
    for path in sorted(write_project(args.name, kind, pathlib.Path())):
        print(path)
    print(f"next: {_NEXT[kind].format(name=args.name)}")


def write_project(name: str, kind: str, parent: pathlib.Path) -> list[pathlib.Path]:
    """Write the directory `parent/name` from a template, and return its files.

    Args:
      name: stands for `my_name` in the template.
      kind: the template, 'experiment' or 'package'.
      parent: the directory to write to.

    Raises:
      ConfigError: the name is no identifier, or that of an installed module or an extra.
      FileExistsError: there is a file or directory with this name.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        fitting = re.sub(r"\W+", "_", name).strip("_")
        is_usable = fitting.isidentifier() and not keyword.iskeyword(fitting)
        hint = f"; did you mean {fitting!r}?" if is_usable else ""
        raise ConfigError(f"`NAME` must be an identifier of Python, got {name!r}{hint}")
    directory = parent / name
    if directory.exists():
        raise FileExistsError(f"`NAME` must be the name of a new directory, {directory} exists")
    for taken, owner in (
        (not is_free(name, directory.resolve()), "an installed module, which it would hide"),
        (kind == "package" and name in list_extras(), "an extra of jengine"),
    ):
        if taken:
            raise ConfigError(f"`NAME` must not be the name of {owner}, got {name!r}")
    names = {
        "my_name": name,
        "my-name": name.replace("_", "-"),
        "MyName": "".join(word[:1].upper() + word[1:] for word in name.split("_")),
    }
    texts = {}
    for source in sorted((_TEMPLATES / kind).rglob("*.txt")):
        texts[source.relative_to(_TEMPLATES / kind).with_suffix("")] = source.read_text("utf-8")
    written = []
    try:
        for relative, text in texts.items():
            path = directory / _replace(str(relative), names)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_replace(text, names), encoding="utf-8")
            written.append(path)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)  # or the next try would find it
        raise
    return written


def _replace(text: str, names: dict[str, str]) -> str:
    return re.sub("|".join(names), lambda match: names[match[0]], text)
