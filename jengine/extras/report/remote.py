"""Local copies of the files in a bucket that a report reads."""

import hashlib
import pathlib
import re

from jengine.checkpoint.identity import TIMESTAMP
from jengine.config.plugins import load_provided
from jengine.config.storage import (
    FileInfo,
    is_url,
    list_directory,
    list_files,
    read_many,
    storage_path,
)
from jengine.config.work_dir import EVALUATIONS, RECORD, SCORES

# below a log directory
_READ = re.compile(
    rf"[^/]+\.json|vis_data/([^/]+\.(json|py)|.+\.png)|{EVALUATIONS}/[^/]+/{re.escape(SCORES)}"
)
SCALARS = pathlib.PurePath("vis_data", "scalars.json")
_EVALUATED = re.compile(rb'"mode": ?"(test|val)"')  # in a line of scalars
_roots: dict[pathlib.Path, str] = {}  # URLs by the local directory with their copies
_fetched: dict[pathlib.Path, FileInfo] = {}


def fetch_runs(path: str, file_names: tuple[str, ...]) -> pathlib.Path:
    """Return the directory with a report's runs: an absolute path, or for a URL a local copy.

    The copy has what a report reads from the newest run in a work dir, or in each of several; not
    the checkpoints.

    Args:
      path: a work dir, a log directory or a directory of work dirs.
      file_names: files in a work dir that a report reads as well.
    """
    root = storage_path("work_dir", path)
    if not is_url(root):
        return pathlib.Path(root)
    url = str(root)
    copies = load_provided("url_files", "temporary_copies")()
    copy = copies / hashlib.sha256(url.encode()).hexdigest()[:8] / root.name
    _roots[copy] = url
    if TIMESTAMP.fullmatch(root.name):
        _fetch_log_dir(url, copy)
    else:
        entries = list_directory(url)
        if not _fetch_newest(url, copy, entries, file_names):
            for name in (
                name for name, is_directory in entries.items() if is_directory and _is_name(name)
            ):
                _fetch_newest(
                    f"{url}/{name}", copy / name, list_directory(f"{url}/{name}"), file_names
                )
    return copy


def origin(path: pathlib.Path) -> str:
    """Return the URL that a local path is a copy of; other paths unchanged."""
    for copy, url in _roots.items():
        if path.is_relative_to(copy):
            return "/".join([url, *path.relative_to(copy).parts])
        if path == copy.parent:  # the work dir of a log directory
            return url.rpartition("/")[0]
    return str(path)


def _fetch_newest(
    url: str, copy: pathlib.Path, entries: dict[str, bool], file_names: tuple[str, ...]
) -> bool:
    """Fetch the newest run in a work dir, and return whether there is one."""
    found = [name for name in file_names if name in entries]
    _fetch(url, copy, dict.fromkeys(found))
    timestamps = sorted((name for name in entries if TIMESTAMP.fullmatch(name)), reverse=True)
    return any(_fetch_log_dir(f"{url}/{name}", copy / name) for name in timestamps) or bool(found)


def _fetch_log_dir(url: str, copy: pathlib.Path) -> bool:
    files = list_files(url)
    _fetch(url, copy, {name: info for name, info in files.items() if _READ.fullmatch(name)})
    return is_training(copy)


def is_training(log_dir: pathlib.Path) -> bool:
    """Return whether a directory has the logs of a training, not only of tests or validations.

    Those of other programs have no record, but scalars.
    """
    if (log_dir / RECORD).is_file():
        return True
    path = log_dir / SCALARS
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return any(not _EVALUATED.search(line) for line in file)


def _fetch(url: str, copy: pathlib.Path, files: dict[str, FileInfo] | dict[str, None]) -> None:
    """Fetch the files that have changed since the last time; None stands for an unknown size."""
    due = {
        f"{url}/{name}": (copy / name, info)
        for name, info in files.items()
        # A listing is data: a name with .. must not write outside of the copies.
        if all(map(_is_name, name.split("/")))
        and (info is None or _fetched.get(copy / name) != info)
    }
    for source, content in read_many(due).items():
        path, info = due[source]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if info is not None:
            # A served page asks every few seconds: what has not changed in the store is not fetched
            # again.
            _fetched[path] = info


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..")  # names in a bucket can be anything
