"""Config files at URLs."""

import os
import pathlib

from jengine.config.modules import ORIGINS
from jengine.config.storage import strip_query
from jengine.extras.cloud.downloads import temporary_copies
from jengine.extras.cloud.url_files import download_file, get_filesystem

_DIRECTORY = "configs"  # of temporary copies


def fetch_config(url: str) -> pathlib.Path:
    """Copy a config file and the other Python files of its directory, which it may import, and
    return the local path.

    The copies have the directories of the URL, so that a config inherits from `../base.py` as in a
    clone.

    Raises:
      FileNotFoundError: there is no such file.
    """
    directory, _, name = strip_query(url).rpartition("/")
    path = fetch_modules(directory) / name
    if not path.exists():  # a web server may not list its files
        try:
            download_file(url, path)
        except FileNotFoundError:
            raise FileNotFoundError(f"the config file {url!r} does not exist") from None
    return path


def fetch_modules(url: str) -> pathlib.Path:
    """Copy the Python files directly at a URL, and return the local directory."""
    scheme, _, path = url.partition("://")
    directory = pathlib.Path(os.path.normpath(temporary_copies() / _DIRECTORY / scheme / path))
    directory.mkdir(parents=True, exist_ok=True)
    ORIGINS[str(directory)] = url
    store = get_filesystem(url)
    try:
        found = sorted(str(entry).rpartition("/")[2] for entry in store.ls(url, detail=False))
    except Exception as error:
        # A web server need not list its files, whatever it answers; then only the config itself is
        # fetched.
        if scheme in ("http", "https") or isinstance(
            error, FileNotFoundError | NotImplementedError
        ):
            return directory
        raise
    for name in found:
        if name.endswith(".py"):
            store.get_file(f"{url}/{name}", str(directory / name))
    return directory


def fetch_base(file: pathlib.Path) -> None:
    """Fetch a base file, by the path that it would have next to the copy of a config, if it is
    missing.
    """
    root = temporary_copies() / _DIRECTORY
    if not file.exists() and file.is_relative_to(root):
        scheme, *parts = file.relative_to(root).parts
        fetch_config(f"{scheme}://{'/'.join(parts)}")
