"""Paths on a local file system and URLs of object storage, `gs://bucket/run` and `s3://bucket/run`."""

import os
import posixpath
import re
from typing import Any

from etils import epath

from jengine.errors import ConfigError, require_extra

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a URL of any scheme: `os.path.abspath` would make a directory 's3:' from one.

    >>> is_url("gs://bucket/run"), is_url("work_dirs/run")
    (True, False)
    """
    return _SCHEME.match(os.fspath(path)) is not None


def storage_path(name: str, path: str | os.PathLike[str]) -> epath.Path:
    """Return an absolute local path, or the path of a URL.

    >>> storage_path("work_dir", "gs://bucket/run/").name
    'run'
    >>> storage_path("work_dir", "ftp://host/run")
    Traceback (most recent call last):
    jengine.errors.ConfigError: `work_dir` must be a local path or a URL of gs:// or s3://, got 'ftp://host/run'; ...

    Args:
      name: the argument, for the message.
      path: file or directory, which need not exist.

    Raises:
      ConfigError: a URL of another scheme, or one without a bucket. MissingPackageError: the extra `cloud` is missing.
    """
    text = os.fspath(path)
    if not (match := _SCHEME.match(text)):
        return epath.Path(os.path.abspath(text))
    if match[1] not in _PACKAGES:
        schemes = " or ".join(f"{scheme}://" for scheme in _PACKAGES)
        raise ConfigError(
            f"`{name}` must be a local path or a URL of {schemes}, got {text!r}; mount other storage as a directory"
        )
    bucket, _, key = text[match.end() :].partition("/")
    if not bucket:
        raise ConfigError(f"`{name}` must have the name of a bucket, like '{match[0]}bucket/run', got {text!r}")
    _prepare(match[1])
    return epath.Path(f"{match[0]}{bucket}{posixpath.normpath(f'/{key}').rstrip('/')}")


def get_filesystem(path: epath.Path) -> Any:
    """Return the fsspec file system of a URL, for what `etils.epath` cannot do: listings with sizes, requests in bulk.

    It keeps no listings, since other processes write too.
    """
    import fsspec

    scheme = os.fspath(path).partition(":")[0]
    _prepare(scheme)
    return fsspec.filesystem(scheme)


def check_local_path(name: str, path: str | os.PathLike[str]) -> str:
    """Return the absolute path, which must not be a URL.

    >>> check_local_path("work_dir", "s3://bucket/run")
    Traceback (most recent call last):
    jengine.errors.ConfigError: `work_dir` must be a path on a local or mounted file system, got 's3://bucket/run'; ...

    Args:
      name: the argument, for the message.
      path: file or directory, which need not exist.

    Raises:
      ConfigError: a URL.
    """
    text = os.fspath(path)
    if match := _SCHEME.match(text):
        scheme = match[1].lower()
        tool = {"gs": "Cloud Storage FUSE", "s3": "Mountpoint for Amazon S3"}.get(scheme, "a FUSE driver")
        raise ConfigError(
            f"`{name}` must be a path on a local or mounted file system, got {text!r}; mount the storage of "
            f"{scheme}:// as a directory ({tool}), or copy to and from it"
        )
    return os.path.abspath(text)


def _prepare(scheme: str) -> None:
    package = _PACKAGES[scheme]
    with require_extra("cloud", f"{scheme}:// paths require {package}"):
        __import__(package)
    import fsspec

    # Both packages keep listings forever by default, also those that `etils.epath` opens for Orbax
    for protocol in {"gs": ("gs", "gcs"), "s3": ("s3", "s3a")}[scheme]:
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
