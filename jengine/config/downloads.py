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
from collections.abc import Mapping
from typing import Any

from jengine.config.errors import ConfigError
from jengine.config.storage import check_regular, download_file, file_info, file_name, is_url

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
_SCHEMES: dict[Any, tuple[str, ...]] = {  # by backend
    **dict.fromkeys(("local", "disk", "LocalBackend", "HardDiskBackend"), ()),
    **dict.fromkeys(("petrel", "ceph", "s3", "PetrelBackend", "CephBackend"), ("s3", "gs")),
    **dict.fromkeys(("http", "HTTPBackend"), ("http", "https")),
}
_ADVICE = (
    "leave backend_args out, and write a path or a URL, such as 's3://bucket/file' or "
    "'gs://bucket/file'"
)


def local_copy(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return a local path unchanged, and for a URL of any fsspec scheme a local copy of the file.

    A file is fetched once: the copy stays in `~/.cache/jengine/files`, or in the directory that the
    environment variable `JENGINE_LOCAL_DIR` names, until the file at the URL changes by what the
    store says: its ETag, time of modification, generation, checksum or size. If a web server says
    no more than a size, the file is fetched each time. You may remove the directory at any time.

    >>> local_copy("data/tokens.npy").name
    'tokens.npy'

    Raises:
      FileNotFoundError: there is no file at the URL. ConfigError: fsspec does not know the scheme,
        or the local path is a pipe or a device. StorageError: the request failed, or the file
        arrived with another size or checksum than the store had named. MissingPackageError: the
        package for the scheme is missing.
    """
    if not is_url(path):
        check_regular(path)
        return pathlib.Path(path)
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


def apply_backend_args(
    name: str,
    path: str | None,
    backend_args: Mapping[str, Any] | None,
    file_client_args: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the path or URL that MMEngine's `backend_args`, or `file_client_args`, mean for a
    path.

    Here a URL alone selects the storage. `path_mapping` replaces the start of a path.

    >>> mapping = {"data/": "s3://datasets/"}
    >>> apply_backend_args(
    ...     "ann_file", "data/coco/a.json", dict(backend="petrel", path_mapping=mapping)
    ... )
    's3://datasets/coco/a.json'
    >>> apply_backend_args("ann_file", "data/coco/a.json", dict(backend="local"))
    'data/coco/a.json'

    Args:
      name: the argument with the path, for messages.
      path: file or directory; None if the argument is not set.
      backend_args, file_client_args: None, or one of them is a dict with `backend` and perhaps
        `path_mapping`.

    Raises:
      ConfigError: the backend has no equivalent, the path is none of its URLs, or both dicts are
        given.
    """
    check_backend_args(backend_args, file_client_args)
    settings = backend_args or file_client_args or {}
    backend = settings.get("backend")
    found = path or ""
    mapping = settings.get("path_mapping") or {}
    found = next(
        (new + found.removeprefix(old) for old, new in mapping.items() if found.startswith(old)),
        found,
    )
    schemes = _SCHEMES.get(backend)
    if backend is None or (found.partition("://")[0] in schemes if schemes else not is_url(found)):
        return found or path
    example = f"like '{schemes[0]}://...'" if schemes else "of the local file system"
    raise ConfigError(
        f"`{name}` must be a path {example} with backend={backend!r}, got {path!r}; {_ADVICE}"
    )


def check_backend_args(
    backend_args: Mapping[str, Any] | None, file_client_args: Mapping[str, Any] | None = None
) -> None:
    """Raise ConfigError if `apply_backend_args` would refuse the settings for every path.

    >>> check_backend_args(dict(backend="lmdb"))
    Traceback (most recent call last):
    jengine.config.errors.ConfigError: `backend_args` must be None or have backend='local', 's3' or
    'http', got 'lmdb'; ...
    """
    if backend_args is not None and file_client_args is not None:
        raise ConfigError(
            "`backend_args` must be left out with file_client_args, its old name, got "
            f"{backend_args} and {file_client_args}"
        )
    settings = dict(backend_args or file_client_args or {})
    backend = settings.pop("backend", None)
    settings.pop("path_mapping", None)
    if settings:
        raise ConfigError(
            f"`backend_args` must have only backend and path_mapping, got {sorted(settings)}; "
            "settings of a storage "
            "client are environment variables, such as AWS_ENDPOINT_URL, or in a file of fsspec"
        )
    if backend is not None and backend not in _SCHEMES:
        raise ConfigError(
            "`backend_args` must be None or have backend='local', 's3' or 'http', got "
            f"{backend!r}; {_ADVICE}"
        )


def _cache_dir() -> pathlib.Path:
    if local := os.environ.get(LOCAL_DIR):
        return pathlib.Path(local).absolute()
    return (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jengine"
    )
