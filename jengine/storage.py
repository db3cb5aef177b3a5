"""Paths on a local file system and URLs of object storage, `gs://bucket/run` and `s3://bucket/run`."""

import base64
import contextlib
import errno
import functools
import os
import pathlib
import posixpath
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from etils import epath

from jengine.errors import ConfigError, MissingPackageError, require_extra

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
# fsspec, which removes objects too, takes some for patterns; the stores advise against the others
_REFUSED = re.compile(r"[#*;?\[\]\x00-\x1f\x7f]")
_MAX_KEY = 800  # bytes: a store has names of at most 1,024, and those of checkpoint files are longer
_T = TypeVar("_T")
# What is there is no file, or there is none: nothing that another attempt could change
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_IMPOSSIBLE = (errno.ENAMETOOLONG, errno.ELOOP)
_PAUSES = (0.1, 0.3, 1.0)  # seconds before a local read is tried again


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
      ConfigError: a URL of another scheme, without a bucket, or with a name that some library takes for a pattern.
      MissingPackageError: the extra `cloud` is missing.
    """
    text = os.fspath(path)
    if not (match := _SCHEME.match(text)):
        return epath.Path(os.path.abspath(os.path.expanduser(text)))
    if match[1] not in _PACKAGES:
        schemes = " or ".join(f"{scheme}://" for scheme in _PACKAGES)
        raise ConfigError(
            f"`{name}` must be a local path or a URL of {schemes}, got {text!r}; mount other storage as a directory"
        )
    bucket, _, key = text[match.end() :].partition("/")
    if not bucket:
        raise ConfigError(f"`{name}` must have the name of a bucket, like '{match[0]}bucket/run', got {text!r}")
    if found := _REFUSED.search(key):
        raise ConfigError(
            f"`{name}` must be a URL without {found[0]!r}, which libraries for buckets misread, got {text!r}"
        )
    if len(key.encode()) > _MAX_KEY:
        raise ConfigError(f"`{name}` must be a URL with at most {_MAX_KEY} bytes after the bucket, got {text!r}")
    _prepare(match[1])
    return epath.Path(f"{match[0]}{bucket}{posixpath.normpath(f'/{key}').rstrip('/')}")


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a file or directory at a path; at a URL, whether it has files.

    Raises:
      StorageError: the store does not answer.
    """
    return bool(list_files(path)) if is_url(path) else os.path.exists(path)


def plain_name(text: str) -> str:
    """Return `text` as a name of one file or directory on a disk or in a bucket: other characters become `_`.

    >>> plain_name("bbox/mAP@[.5:.95]")
    'bbox_mAP@_.5:.95_'
    """
    return _REFUSED.sub("_", text).replace("/", "_")


def get_filesystem(path: str | os.PathLike[str]) -> Any:
    """Return the fsspec file system of a URL, for what `etils.epath` cannot do: listings with sizes, requests in bulk.

    It keeps no listings, since other processes write too.

    Raises:
      ConfigError: fsspec does not know the scheme. MissingPackageError: the package for it is missing.
    """
    return _make_filesystem(os.fspath(path).partition(":")[0], os.getpid())  # fsspec's own cache has one per thread


class StorageError(RuntimeError):
    """Error of a disk or of object storage, after all retries. Unlike an OSError it never means that a file is bad."""


class FileInfo(NamedTuple):
    """What a listing says about a file."""

    size: int  # bytes
    md5: str | None = None  # hexadecimal; None for a local file, or where the store does not know it


def _ask(path: str | os.PathLike[str], request: Callable[[], _T]) -> _T:
    """Return what a request to a store returns; all of them may be repeated.

    The clients repeat those that fail, but not those with an answer that makes no sense, or has another checksum.
    """
    attempts = len(_PAUSES)
    while True:
        try:
            return request()
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:  # of aiohttp, Google or botocore
            attempts -= 1
            if attempts == 0 or isinstance(error, OSError):
                raise StorageError(f"{os.fspath(path)}: {str(error) or type(error).__name__}") from error


def retry_read(path: str | os.PathLike[str], read: Callable[[], _T]) -> _T:
    """Return what `read` returns for a local path; try again if the disk fails.

    A network file system may answer ESTALE or EIO for a file that is whole: unreadable is not absent.

    Raises:
      StorageError: all attempts failed. OSError: there is no such file or directory.
    """
    pauses = iter(_PAUSES)
    while True:
        try:
            return read()
        except _ABSENT:
            raise
        except OSError as error:
            if error.errno in _IMPOSSIBLE:
                raise
            pause = None if isinstance(error, PermissionError) else next(pauses, None)
            if pause is None:
                raise StorageError(f"{os.fspath(path)} cannot be read: {error.strerror or error}") from error
        time.sleep(pause)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file, with one request if it is a URL.

    Raises:
      FileNotFoundError: it does not exist. OSError: it is no file. StorageError: it cannot be read.
    """
    if not is_url(path):
        return retry_read(path, pathlib.Path(path).read_bytes)
    content: bytes = _ask(path, lambda: get_filesystem(path).cat_file(os.fspath(path)))
    return content


def read_many(paths: Iterable[str | os.PathLike[str]]) -> dict[str, bytes]:
    """Return the bytes of those files that exist by path; URLs are read many at a time.

    Raises:
      StorageError: a file cannot be read.
    """
    names = [os.fspath(path) for path in paths]
    contents: dict[str, bytes] = {}
    if not names or not is_url(names[0]):
        for name in names:
            with contextlib.suppress(OSError):
                contents[name] = read_bytes(name)
        return contents
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


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file at once: with one request if it is a URL, else also flushed to disk with its directory."""
    if is_url(path):
        _ask(path, lambda: get_filesystem(path).pipe_file(os.fspath(path), content))
        return
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    sync(temporary)  # before the rename, or a power failure could leave an empty file
    temporary.replace(path)
    sync(path.parent)  # the rename itself


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file or a directory to disk, on file systems that support it; objects need no such thing."""
    if is_url(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not os.path.isdir(path):  # some network file systems cannot sync directories
            raise
    finally:
        os.close(descriptor)


def list_files(directory: str | os.PathLike[str]) -> dict[str, FileInfo]:
    """Return all files below a directory by relative path; for a URL with one request for 1,000 of them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_bytes(f"{directory}/log.txt", b"one line")
    ...     list_files(directory)
    {'log.txt': FileInfo(size=8, md5=None)}
    """
    if not is_url(directory):

        def find() -> dict[str, FileInfo]:
            files = (path for path in sorted(pathlib.Path(directory).rglob("*")) if path.is_file())
            return {str(path.relative_to(directory)): FileInfo(path.stat().st_size) for path in files}

        return retry_read(directory, find)
    from fsspec.core import strip_protocol

    found = _ask(directory, lambda: get_filesystem(directory).find(os.fspath(directory), detail=True))
    # As the file system names it: `bucket/run`, for `memory://` `/run`, for `https://` all of it
    prefix = str(strip_protocol(os.fspath(directory))).rstrip("/") + "/"
    return {
        name.removeprefix(prefix): FileInfo(info["size"], _read_md5(info))
        for name, info in sorted(found.items())
        if name.startswith(prefix) and info["type"] == "file" and not name.endswith("/")
    }


def list_directory(directory: str | os.PathLike[str]) -> dict[str, bool]:
    """Return the names in a directory, each with whether it is a directory; {} if there is none.

    Raises:
      StorageError: it cannot be read.
    """
    if not is_url(directory):

        def scan() -> dict[str, bool]:
            with os.scandir(directory) as entries:
                return {entry.name: entry.is_dir() for entry in sorted(entries, key=lambda entry: entry.name)}

        try:
            return retry_read(directory, scan)
        except (OSError, ValueError):  # also a name that is too long, or not a name at all
            return {}
    try:
        found = _ask(directory, lambda: get_filesystem(directory).ls(os.fspath(directory), detail=True))
    except FileNotFoundError:
        return {}
    prefix = os.fspath(directory).partition("://")[2] + "/"  # an object with the directory's own name is no entry
    kinds: dict[str, bool] = {info["name"].rstrip("/"): info["type"] == "directory" for info in found}
    return {name.removeprefix(prefix): kind for name, kind in kinds.items() if name.startswith(prefix)}


def make_pointer(directory: pathlib.PurePath, path: pathlib.PurePath) -> str:
    """Return the text of a pointer in `directory` to `path`, which a copy of both resolves to the copy.

    It is relative, unless there is no relative path: to another bucket, or between a bucket and a disk.

    >>> make_pointer(epath.Path("/runs/a"), epath.Path("/runs/a/iter_4"))
    'iter_4'
    """
    if path.parent == directory:
        return path.name
    if not is_url(path) and not is_url(directory):  # a directory behind a link has another parent
        return os.path.relpath(os.path.join(os.path.realpath(path.parent), path.name), os.path.realpath(directory))
    source, target = os.fspath(directory).split("/", 3), os.fspath(path).split("/", 3)
    if source[:3] != target[:3] or not is_url(path):
        return str(path)
    return posixpath.relpath(f"/{target[3]}", f"/{''.join(source[3:])}")


def resolve_pointer(directory: pathlib.PurePath, text: str) -> epath.Path:
    """Return the path that `make_pointer` made into `text`; it need not exist.

    Absolute paths, which older versions and MMEngine wrote, mean what has this name in `directory`, if there is such.

    >>> resolve_pointer(epath.Path("/runs/a"), "iter_4").as_posix()
    '/runs/a/iter_4'
    """
    if is_url(text) or os.path.isabs(text):
        path = storage_path("pointer", text)
        is_same_kind = is_url(text) == is_url(directory)
        return directory / path.name if is_same_kind and list_directory(directory / path.name) else path
    if is_url(directory) or not text.startswith(".."):
        return storage_path("pointer", f"{directory}/{text}")
    return storage_path("pointer", os.path.join(os.path.realpath(directory), text))


def download_file(url: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy an object to a local file."""
    _ask(url, lambda: get_filesystem(url).get_file(os.fspath(url), os.fspath(target)))


def upload_file(path: str | os.PathLike[str], url: str | os.PathLike[str]) -> None:
    """Copy a local file to an object, a large one in parts."""
    _ask(url, lambda: get_filesystem(url).put_file(os.fspath(path), os.fspath(url)))


def copy_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy an object within a store, which does it without sending the bytes here."""
    _ask(source, lambda: get_filesystem(source).cp_file(os.fspath(source), os.fspath(target)))


def remove_files(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Remove the files of one store, many with each request; those that do not exist are fine."""
    names = [os.fspath(path) for path in paths]
    if not names:
        return
    if not is_url(names[0]):
        for name in names:
            pathlib.Path(name).unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError):
        _ask(names[0], lambda: get_filesystem(names[0]).rm(names))


def check_local_path(name: str, path: str | os.PathLike[str]) -> str:
    """Return the absolute path; raise ConfigError if the argument `name` is a URL.

    >>> check_local_path("work_dir", "s3://bucket/run")
    Traceback (most recent call last):
    jengine.errors.ConfigError: `work_dir` must be a path on a local or mounted file system, got 's3://bucket/run'; ...
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


@functools.cache
def _make_filesystem(scheme: str, process: int) -> Any:
    import fsspec

    if scheme in _PACKAGES:
        _prepare(scheme)
    try:
        return fsspec.filesystem(scheme)
    except ValueError as error:
        raise ConfigError(
            f"a URL must have a scheme that fsspec knows, such as gs:// or s3://, got {scheme}://"
        ) from error
    except ImportError as error:
        raise MissingPackageError(f"{scheme}:// paths require another package: {error}") from error


def _prepare(scheme: str) -> None:
    package = _PACKAGES[scheme]
    with require_extra("cloud", f"{scheme}:// paths require {package}"):
        __import__(package)
    import aiohttp
    import fsspec

    # Both packages keep listings forever by default, also those that `etils.epath` opens for Orbax
    settings: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "gs":  # by default a request that hangs ends after five minutes, and is not tried again
        settings["session_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)}
    for protocol in {"gs": ("gs", "gcs"), "s3": ("s3", "s3a")}[scheme]:
        for name, value in settings.items():
            fsspec.config.conf.setdefault(protocol, {}).setdefault(name, value)


def _read_md5(info: Mapping[str, Any]) -> str | None:
    """Return the MD5 in an entry of a listing; an S3 object that was uploaded in parts, or encrypted, has none."""
    if "md5Hash" in info:
        return base64.b64decode(info["md5Hash"]).hex()
    etag = str(info.get("ETag", "")).strip('"')
    return etag if re.fullmatch("[0-9a-f]{32}", etag) else None
