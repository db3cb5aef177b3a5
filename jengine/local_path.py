"""Paths on a local or mounted file system, as opposed to URLs of object storage."""

import os
import re

from jengine.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def check_local_path(name: str, path: str | os.PathLike[str]) -> str:
    """Return the absolute path, which must not be a URL: `os.path.abspath` makes a directory 's3:' from one.

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
