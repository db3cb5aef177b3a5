"""Config files at URLs."""

import os
import pathlib
import re

from jengine.downloads import temporary_copies
from jengine.storage import get_filesystem

_SCHEME = re.compile(r"([^:/]+)://(.+)")


def fetch_config(url: str) -> pathlib.Path:
    """Copy a config file and the other Python files of its directory, which it may import, and return the local path.

    The copies have the directories of the URL, so that a config inherits from `../base.py` as in a clone.

    Raises:
      FileNotFoundError: there is no such file.
    """
    match = _SCHEME.fullmatch(url)
    assert match is not None  # the caller has checked that it is a URL
    path = pathlib.Path(os.path.normpath(temporary_copies() / "configs" / match[1] / match[2]))
    directory, _, name = url.rpartition("/")
    store = get_filesystem(url)
    try:
        found = {str(entry).rstrip("/").rpartition("/")[2] for entry in store.ls(directory, detail=False)}
    except (FileNotFoundError, NotImplementedError):  # a web server may not list files
        found = set()
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in sorted({name, *(other for other in found if other.endswith(".py"))}):
        try:
            store.get_file(f"{directory}/{other}", str(path.with_name(other)))
        except FileNotFoundError:
            raise FileNotFoundError(f"the config file {url!r} does not exist") from None
    return path


def fetch_base(file: pathlib.Path) -> None:
    """Fetch a base file, by the path that it would have next to the copy of a config, if it is missing."""
    root = temporary_copies() / "configs"
    if file.is_relative_to(root) and not file.exists():
        scheme, *parts = file.relative_to(root).parts
        fetch_config(f"{scheme}://{'/'.join(parts)}")
