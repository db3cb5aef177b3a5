"""Files at URLs, by the file systems of fsspec: what `jengine.config.storage` calls for a URL."""

import base64
import contextlib
import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jengine.config.errors import ConfigError, MissingPackageError, require_extra
from jengine.config.plugins import load_provided, provided
from jengine.config.storage import FileInfo, StorageError, check_allowed

T = TypeVar("T")
_WEB = re.compile("https?://", re.IGNORECASE)
_GONE = (404, 410)  # HTTP status of what is not there
_ATTEMPTS = 3


def get_filesystem(path: str | os.PathLike[str]) -> Any:
    """Return the fsspec file system of a URL, for what `etils.epath` cannot do: listings with
    sizes, requests in bulk.

    It keeps no listings, since other processes write too.

    Raises:
      ConfigError: fsspec does not know the scheme, or see `check_allowed`. MissingPackageError: the
        package for it is missing.
    """
    check_allowed(path)
    # fsspec's own cache has one per thread
    return _make_filesystem(os.fspath(path).partition(":")[0], os.getpid())


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file, with one request."""
    content: bytes = _ask(path, lambda: get_filesystem(path).cat_file(os.fspath(path)))
    return content


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file, with one request."""
    _ask(path, lambda: get_filesystem(path).pipe_file(os.fspath(path), content))


def read_many(names: Sequence[str]) -> dict[str, bytes]:
    """Return the bytes of those files of one store that exist, by URL, many at a time."""
    contents: dict[str, bytes] = {}
    scheme = names[0].partition("//")[0] + "//"

    def fetch() -> dict[str, bytes]:
        found = get_filesystem(names[0]).cat(names, on_error="return")
        found = {names[0]: found} if isinstance(found, bytes) else found
        for name, content in found.items():
            if isinstance(content, bytes):
                contents[scheme + name.removeprefix(scheme)] = content
            elif not isinstance(content, FileNotFoundError):
                raise content
        return contents

    return _ask(names[0], fetch)


def list_files(directory: str | os.PathLike[str]) -> dict[str, FileInfo]:
    """Return all files below a URL by relative path, with one request for 1,000 of them."""
    from fsspec.core import strip_protocol

    found = _ask(
        directory, lambda: get_filesystem(directory).find(os.fspath(directory), detail=True)
    )
    # As the file system names it: `bucket/run`, for `memory://` `/run`, for `https://` all of it
    prefix = str(strip_protocol(os.fspath(directory))).rstrip("/") + "/"
    for name in found:
        # A listing is data: files are copied to these names below a local directory.
        if name.startswith(prefix) and not is_inside(name.removeprefix(prefix)):
            raise StorageError(
                f"{os.fspath(directory)} must have no file with '..' in the name, got {name!r}"
            )
    return {
        name.removeprefix(prefix): FileInfo(info["size"], _read_md5(info))
        for name, info in sorted(found.items())
        if name.startswith(prefix) and info["type"] == "file" and not name.endswith("/")
    }


def is_inside(name: str) -> bool:
    """Return whether a relative name from a listing stays below the directory.

    >>> is_inside("vis_data/scalars.json"), is_inside("../.bashrc"), is_inside("/etc/passwd")
    (True, False, False)
    """
    return not name.startswith("/") and ".." not in name.split("/")


def list_directory(directory: str | os.PathLike[str]) -> dict[str, bool]:
    """Return the names directly below a URL, each with whether there are files below it."""
    try:
        found = _ask(
            directory, lambda: get_filesystem(directory).ls(os.fspath(directory), detail=True)
        )
    except FileNotFoundError:
        return {}
    # an object with the directory's own name is no entry
    prefix = os.fspath(directory).partition("://")[2] + "/"
    kinds: dict[str, bool] = {
        info["name"].rstrip("/"): info["type"] == "directory" for info in found
    }
    return {
        name.removeprefix(prefix): kind for name, kind in kinds.items() if name.startswith(prefix)
    }


def remove_files(names: Sequence[str]) -> None:
    """Remove the files of one store, many with each request; those that do not exist are fine."""
    with contextlib.suppress(FileNotFoundError):
        _ask(names[0], lambda: get_filesystem(names[0]).rm(names))


def download_file(
    url: str | os.PathLike[str],
    target: str | os.PathLike[str],
    info: Mapping[str, Any] | None = None,
) -> None:
    """Copy an object to a local file, and compare size and checksum with those in `info`.

    `info` is from `file_info`, which is asked for without it; {} has nothing to compare.

    Raises:
      FileNotFoundError: there is no such object. StorageError: the request failed, or the file
        differs from `info`.
    """
    info = file_info(url) if info is None else info
    _ask(url, lambda: get_filesystem(url).get_file(os.fspath(url), os.fspath(target)))
    # another file is decompressed on the way
    if info.get("contentEncoding", "identity") == "identity":
        _check_copy(os.fspath(url), pathlib.Path(target), info)


def _check_copy(url: str, copy: pathlib.Path, info: Mapping[str, Any]) -> None:
    size = copy.stat().st_size
    if info.get("size") not in (None, size):  # a proxy may end an answer early, and end it properly
        raise StorageError(
            f"{url}: the file must have {info['size']:,} bytes, got {size:,}; try again"
        )
    # In base64. The ETag of S3 is another checksum if the bucket is encrypted.
    expected = info.get("Content-MD5") or info.get("md5Hash")
    if expected is None:
        return
    with copy.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()
    if (found := base64.b64encode(digest).decode()) != expected:
        raise StorageError(f"{url}: the file must have the MD5 {expected}, got {found}; try again")


def file_info(url: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a store says about a file, with the names of the file system.

    Raises:
      FileNotFoundError: there is no such file. StorageError: the request failed; the message has
        the HTTP status.
    """
    info: dict[str, Any] = _ask(url, lambda: get_filesystem(url).info(os.fspath(url)))
    return info


def upload_file(path: str | os.PathLike[str], url: str | os.PathLike[str]) -> None:
    """Copy a local file to an object, a large one in parts."""
    _ask(url, lambda: get_filesystem(url).put_file(os.fspath(path), os.fspath(url)))


def copy_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy an object within a store, which does it without sending the bytes here."""
    _ask(source, lambda: get_filesystem(source).cp_file(os.fspath(source), os.fspath(target)))


def _ask(path: str | os.PathLike[str], request: Callable[[], T]) -> T:
    """Return what a request to a store returns; all of them may be repeated.

    The clients repeat those that fail, but not those with an answer that makes no sense, or has
    another checksum.
    """
    attempts = _ATTEMPTS
    while True:
        try:
            return request()
        except Exception as error:  # of aiohttp, Google or botocore
            if (failure := _find_failure(path, error)) is None:
                raise
            attempts -= 1
            if attempts == 0 or isinstance(error, OSError):
                raise failure from error


def _find_failure(path: str | os.PathLike[str], error: Exception) -> StorageError | None:
    """Return the StorageError for an error of a request.

    None if the error itself says what is wrong.
    """
    if isinstance(error, FileExistsError | ConfigError | MissingPackageError):
        return None
    cause: BaseException = error
    if isinstance(error, FileNotFoundError):
        # To fsspec a file is missing after every error of a web server, and the cause is the error
        # itself.
        if not _WEB.match(os.fspath(path)) or error.__cause__ is None:
            return None
        cause = error.__cause__
    status = getattr(cause, "status", None)
    if isinstance(error, FileNotFoundError) and status in _GONE:
        return None
    reason = type(cause).__name__ if status == 0 else str(cause) or type(cause).__name__
    if status:  # 0 for too many redirects
        reason = f"HTTP status {status} ({getattr(cause, 'message', '')})"
    return StorageError(f"{os.fspath(path)}: {reason}")


@functools.cache
def _make_filesystem(scheme: str, process: int) -> Any:
    import fsspec

    if scheme in provided("path_schemes"):
        load_provided("path_schemes", scheme).make_path("path", f"{scheme}://bucket")
    elif scheme in ("http", "https"):
        fsspec.config.conf.setdefault(scheme, {}).setdefault(
            "client_kwargs", {"timeout": make_timeout()}
        )
    try:
        return fsspec.filesystem(scheme)
    except ValueError as error:
        raise ConfigError(
            f"a URL must have a scheme that fsspec knows, such as gs:// or s3://, got {scheme}://"
        ) from error
    except ImportError as error:
        raise MissingPackageError(f"{scheme}:// paths require another package: {error}") from error


def make_timeout() -> Any:
    """Return the limits of a request: by default each one ends after five minutes, whether it
    hangs or is large.
    """
    with require_extra("cloud", "URLs require aiohttp"):
        import aiohttp
    return aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)


def _read_md5(info: Mapping[str, Any]) -> str | None:
    """Return the MD5 in an entry of a listing.

    An S3 object that was uploaded in parts, or encrypted, has none.
    """
    if "md5Hash" in info:
        return base64.b64decode(info["md5Hash"]).hex()
    etag = str(info.get("ETag", "")).strip('"')
    return etag if re.fullmatch("[0-9a-f]{32}", etag) else None
