"""Local copies of files at URLs, for code that requires a local file: memory maps, imports,
archives.
"""

import atexit
import functools
import hashlib
import os
import pathlib
import shutil
import tempfile
import uuid

from jengine.config.storage import file_name
from jengine.extras.cloud.url_files import download_file, file_info

LOCAL_DIR = "JENGINE_LOCAL_DIR"
# What a store says about the version of a file; each spells it in its own way, here in lower case
# without - and _
_VERSIONS = frozenset(
    (
        "size",
        "etag",
        "lastmodified",
        "mtime",
        "modified",
        "modify",
        "modificationtime",
        "created",
        "updated",
        "generation",
        "versionid",
        "sha",
        "blobid",
        "md5hash",
        "contentmd5",
        "digest",
    )
)


def fetch(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return a local copy of the file at a URL of any fsspec scheme.

    A file is fetched once: the copy stays in `~/.cache/jengine/files`, or in the directory that the
    environment variable `JENGINE_LOCAL_DIR` names, until the file at the URL changes by what the
    store says: its ETag, time of modification, generation, checksum or size. If a web server says
    no more than a size, the file is fetched each time. You may remove the directory at any time.

    Raises:
      FileNotFoundError: there is no file at the URL. ConfigError: fsspec does not know the
        scheme. StorageError: the request failed, or the file
        arrived with another size or checksum than the store had named. MissingPackageError: the
        package for the scheme is missing.
    """
    url = os.fspath(path)
    info = file_info(url)
    version = {
        name: str(value) for name, value in sorted(info.items()) if _normalize(name) in _VERSIONS
    }
    digest = hashlib.sha256("\n".join([url, *version.values()]).encode()).hexdigest()[:16]
    name = file_name(url)[-60:]  # the end has the suffix; disks have names of at most 255 bytes
    copy = _cache_dir() / "files" / digest / (name if name.strip(".") else "file")
    if version.keys() <= {"size"} or not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        # another process may fetch it too
        incoming = copy.with_name(f"{uuid.uuid4().hex}.incoming")
        try:
            download_file(url, incoming, info)
            incoming.replace(copy)
        finally:
            incoming.unlink(missing_ok=True)
    return copy


def _normalize(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


@functools.cache
def temporary_copies() -> pathlib.Path:
    """Return a directory for files that change or belong together; it ends with the process."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="jengine-"))  # which other users cannot read
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _cache_dir() -> pathlib.Path:
    if local := os.environ.get(LOCAL_DIR):
        return pathlib.Path(local).absolute()
    return (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jengine"
    )
