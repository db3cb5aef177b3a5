"""Paths on a local file system and URLs of object storage, `gs://bucket/run` and
`s3://bucket/run`.
"""

import contextlib
import contextvars
import errno
import os
import pathlib
import posixpath
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from etils import epath

from jengine.config.errors import ConfigError
from jengine.config.plugins import load_provided, provided

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_WEB = re.compile("https?://", re.IGNORECASE)
LARGE = 2**36  # bytes; a limit for weights and data that are read as a whole
_MAX_BYTES = 2**30  # of other local files
_CHUNK = 2**20  # bytes
_only: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "jengine_reading_only", default=None
)
# fsspec, which removes objects too, takes some for patterns; the stores advise against the others
_REFUSED = re.compile(r"[#*;?\[\]\x00-\x1f\x7f]")
_T = TypeVar("_T")
# What is there is no file, or there is none: nothing that another attempt could change
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_IMPOSSIBLE = (errno.ENAMETOOLONG, errno.ELOOP)
_PAUSES = (0.1, 0.3, 1.0)  # seconds before a local read is tried again


class Lock(Protocol):
    """Exclusive access to a directory or a URL."""

    def acquire(self) -> None:
        """Acquire the lock, or raise WorkDirLockedError if another run holds it."""

    def check(self, *, before_write: bool = False) -> None:
        """Raise WorkDirLockedError if the lock was lost; before a write, ask the store."""

    def release(self) -> None:
        """Release the lock if this object holds it."""


class LocalFiles:
    """Small files of a run, which are in the work dir. Nothing has to be sent."""

    def fetch(self, directory: str, skip: tuple[str, ...] = ()) -> None:
        """Make the files of an earlier session available, which this one continues."""

    def start(self) -> None:
        """Start to send changed files every so often."""

    def send_all(self) -> None:
        """Send all changed files, for a while again after errors."""

    def close(self, *, keep: bool = True) -> None:
        """Send what is left; without `keep` the local files may be removed."""


class PathScheme(Protocol):
    """What a run needs for a work dir at URLs of one scheme; extras provide it as `path_schemes`.

    Attributes:
      is_staged: whether Orbax cannot write to these URLs, so that `upload_after` does.
    """

    is_staged: bool

    def make_path(self, name: str, url: str) -> epath.Path:
        """Return the path for the argument `name`, and set up the client of the store.

        Raises:
          ConfigError: a URL without a bucket, or with a name that some library misreads.
        """

    def check_processes(self, name: str, url: str | os.PathLike[str]) -> None:
        """Raise ConfigError if the processes of this run cannot save to the argument `name`."""

    def make_lock(self, url: str | os.PathLike[str]) -> Lock:
        """Return the lock for a URL."""

    def is_locked(self, url: str | os.PathLike[str]) -> bool:
        """Return whether a run holds the lock."""

    def choose_local_dir(self, url: str) -> str:
        """Return a new local directory, to which a run at a URL writes small files."""

    def send_files(self, local_dir: str, url: str, check: Callable[[], None]) -> LocalFiles:
        """Return what sends them; `check` raises an error if this run must not write any more."""

    def find_local(self, directory: pathlib.PurePath, *, arrays: bool) -> pathlib.PurePath:
        """Return where Orbax can read the structure of arrays, or also the `arrays`."""

    def upload_after(
        self,
        write: Callable[[pathlib.PurePath], Callable[[], None]],
        directory: pathlib.PurePath,
        prepare: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """Start `write` with a local directory; return what finishes it, prepares and uploads."""


def find_scheme(path: str | os.PathLike[str]) -> PathScheme | None:
    """Return what an extra provides for the scheme of a URL; None for a local path.

    Raises:
      UnknownNameError: no extra provides it.
    """
    match = _SCHEME.match(os.fspath(path))
    return None if match is None else load_provided("path_schemes", match[1])


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a URL of any scheme: `os.path.abspath` would make a directory 's3:'
    from one.

    >>> is_url("gs://bucket/run"), is_url("work_dirs/run")
    (True, False)
    """
    return _SCHEME.match(os.fspath(path)) is not None


def strip_query(path: str | os.PathLike[str]) -> str:
    """Return a web address without query and fragment, and any other path or URL unchanged.

    >>> strip_query("https://host/models/w.npz?download=true"), strip_query("s3://bucket/what?.npz")
    ('https://host/models/w.npz', 's3://bucket/what?.npz')
    """
    text = os.fspath(path)
    return re.split("[?#]", text, maxsplit=1)[0] if _WEB.match(text) else text


def file_name(path: str | os.PathLike[str]) -> str:
    """Return the last part of a path or a URL, without a query."""
    return strip_query(path).rstrip("/").rpartition("/")[2]


def storage_path(name: str, path: str | os.PathLike[str]) -> epath.Path:
    """Return an absolute local path, or the path of a URL.

    >>> storage_path("work_dir", "gs://bucket/run/").name
    'run'
    >>> storage_path("work_dir", "ftp://host/run")
    Traceback (most recent call last):
    jengine.config.errors.ConfigError: `work_dir` must be a local path or a URL of gs:// or s3://,
    got 'ftp://host/run'; ...

    Args:
      name: the argument, for the message.
      path: file or directory, which need not exist.

    Raises:
      ConfigError: a URL of another scheme, without a bucket, or with a name that some library takes
        for a pattern.
      MissingPackageError: the package for the scheme is missing.
    """
    text = os.fspath(path)
    if not (match := _SCHEME.match(text)):
        return epath.Path(os.path.abspath(os.path.expanduser(text)))
    if match[1] not in provided("path_schemes"):
        schemes = " or ".join(f"{scheme}://" for scheme in provided("path_schemes"))
        raise ConfigError(
            f"`{name}` must be a local path or a URL of {schemes or 'an installed extra'}, "
            f"got {text!r}; mount other storage as a directory"
        )
    return load_provided("path_schemes", match[1]).make_path(name, text)


@contextlib.contextmanager
def reading_only(directory: str | os.PathLike[str] | None) -> Iterator[None]:
    """Let code inside read files in `directory` alone, in this thread; None restricts nothing.

    For configs from elsewhere: what they name must be neither read nor requested with the rights of
    this user.
    """
    token = _only.set(None if directory is None else os.fspath(directory))
    try:
        yield
    finally:
        _only.reset(token)


def allowed_directory() -> str | None:
    """Return the directory of `reading_only`; None outside of it."""
    return _only.get()


def check_allowed(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError inside of `reading_only` if a path or URL is outside of that directory."""
    directory = _only.get()
    if directory is None:
        return
    text = os.fspath(path)
    if is_url(text) or is_url(directory):
        is_allowed = f"{text}/".startswith(directory.rstrip("/") + "/") and ".." not in text.split(
            "/"
        )
    else:
        is_allowed = pathlib.Path(os.path.realpath(text)).is_relative_to(
            os.path.realpath(directory)
        )
    if not is_allowed:
        raise ConfigError(
            f"a config from elsewhere must name only files in {directory}, got {text!r}; if you "
            "trust the file, pass "
            "trust=True (on the command line --trust), with which it can run any code"
        )


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a file or directory at a path; at a URL, whether it has files.

    Raises:
      StorageError: the store does not answer.
    """
    return bool(list_files(path)) if is_url(path) else os.path.exists(path)


def plain_name(text: str) -> str:
    """Return `text` as a name of one file or directory on a disk or in a bucket: other characters
    become `_`.

    >>> plain_name("bbox/mAP@[.5:.95]")
    'bbox_mAP@_.5:.95_'
    """
    return _REFUSED.sub("_", text).replace("/", "_")


class StorageError(RuntimeError):
    """Error of a disk or of object storage, after all retries.

    Unlike an OSError it never means that a file is bad.
    """


class UnsafeFileError(ConfigError):
    """Error of a file that is not read: a pipe, a device, or one that is too large.

    Reading it again will not help.

    Attributes:
      strerror: the reason, as for an OSError.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.strerror = reason


class FileInfo(NamedTuple):
    """What a listing says about a file."""

    size: int  # bytes
    # hexadecimal; None for a local file, or where the store does not know it
    md5: str | None = None


def retry_read(path: str | os.PathLike[str], read: Callable[[], _T]) -> _T:
    """Return what `read` returns for a local path; try again if the disk fails.

    A network file system may answer ESTALE or EIO for a file that is whole: unreadable is not
    absent.

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
                raise StorageError(
                    f"{os.fspath(path)} cannot be read: {error.strerror or error}"
                ) from error
        time.sleep(pause)


def read_bytes(path: str | os.PathLike[str], limit: int = _MAX_BYTES) -> bytes:
    """Return the bytes of a file, with one request if it is a URL.

    A local file may be from anyone: a pipe, a device or a link to one is refused, since reading it
    may never end.

    Args:
      path: the file.
      limit: the largest size of a local file, in bytes.

    Raises:
      FileNotFoundError: it does not exist. OSError: it is no file. UnsafeFileError: it is not a
        regular file, or larger than `limit`. StorageError: it cannot be read, or the request
        failed.
    """
    if not is_url(path):
        check_allowed(path)
        return retry_read(path, lambda: _read_local(path, limit))
    content: bytes = _of_urls("read_bytes")(path)
    return content


def read_text(path: str | os.PathLike[str], limit: int = _MAX_BYTES) -> str:
    """Return a file as UTF-8 text, with every line end as a newline.

    For the errors see `read_bytes`.
    """
    return read_bytes(path, limit).decode().replace("\r\n", "\n").replace("\r", "\n")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise UnsafeFileError if a local path is a pipe or a device, or a link to one.

    ConfigError, see `check_allowed`.

    For files that a library opens: opening a pipe blocks, and reading a device may never end.
    """
    check_allowed(path)
    if os.path.exists(path):
        _check_mode(path, os.stat(path).st_mode)


def _check_mode(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UnsafeFileError(path, "it must be a regular file, not a pipe or a device")


def _read_local(path: str | os.PathLike[str], limit: int) -> bytes:
    content = bytearray()
    # A pipe without a writer would block. The open file is checked, since another may take its name
    # meanwhile.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        _check_mode(path, status.st_mode)
        size = status.st_size
        while size <= limit and (chunk := file.read(_CHUNK)):  # files in /proc have the size 0
            content += chunk
            size = max(size, len(content))
    if size > limit:
        raise UnsafeFileError(path, f"it must have at most {limit:,} bytes, got {size:,}")
    return bytes(content)


def read_many(paths: Iterable[str | os.PathLike[str]]) -> dict[str, bytes]:
    """Return the bytes of those files that exist by path; URLs are read many at a time.

    Raises:
      StorageError: a file cannot be read.
    """
    names = [os.fspath(path) for path in paths]
    if names and is_url(names[0]):
        return _of_urls("read_many")(names)
    contents: dict[str, bytes] = {}
    for name in names:
        with contextlib.suppress(OSError, UnsafeFileError):
            contents[name] = read_bytes(name, limit=LARGE)
    return contents


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file at once: with one request if it is a URL, else also flushed to disk with
    its directory.
    """
    if is_url(path):
        _of_urls("write_bytes")(path, content)
        return
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    sync(temporary)  # before the rename, or a power failure could leave an empty file
    temporary.replace(path)
    sync(path.parent)  # the rename itself


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file or a directory to disk, on file systems that support it.

    Objects need no such thing.
    """
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
    """Return all files below a directory by relative path.

    For a URL with one request for 1,000 of them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_bytes(f"{directory}/log.txt", b"one line")
    ...     list_files(directory)
    {'log.txt': FileInfo(size=8, md5=None)}
    """
    if is_url(directory):
        return _of_urls("list_files")(directory)

    def find() -> dict[str, FileInfo]:
        files = (path for path in sorted(pathlib.Path(directory).rglob("*")) if path.is_file())
        return {str(path.relative_to(directory)): FileInfo(path.stat().st_size) for path in files}

    return retry_read(directory, find)


def list_directory(directory: str | os.PathLike[str]) -> dict[str, bool]:
    """Return the names in a directory, each with whether it is a directory; {} if there is none.

    Raises:
      StorageError: it cannot be read.
    """
    if is_url(directory):
        return _of_urls("list_directory")(directory)

    def scan() -> dict[str, bool]:
        with os.scandir(directory) as entries:
            found = {entry.name: entry.is_dir() for entry in entries}
        return dict(sorted(found.items()))

    try:
        return retry_read(directory, scan)
    except (OSError, ValueError):  # also a name that is too long, or not a name at all
        return {}


def make_pointer(directory: pathlib.PurePath, path: pathlib.PurePath) -> str:
    """Return the text of a pointer in `directory` to `path`, which a copy of both resolves to the
    copy.

    It is relative, unless there is no relative path: to another bucket, or between a bucket and a
    disk.

    >>> make_pointer(epath.Path("/runs/a"), epath.Path("/runs/a/iter_4"))
    'iter_4'
    """
    if path.parent == directory:
        return path.name
    if not is_url(path) and not is_url(directory):  # a directory behind a link has another parent
        return os.path.relpath(
            os.path.join(os.path.realpath(path.parent), path.name), os.path.realpath(directory)
        )
    source = os.fspath(directory).split("/", 3)
    target = os.fspath(path).split("/", 3)
    if source[:3] != target[:3] or not is_url(path):
        return str(path)
    return posixpath.relpath(f"/{target[3]}", f"/{''.join(source[3:])}")


def resolve_pointer(directory: pathlib.PurePath, text: str) -> epath.Path:
    """Return the path that `make_pointer` made into `text`; it need not exist.

    Absolute paths, which older versions and MMEngine wrote, mean what has this name in `directory`,
    if there is such.

    >>> resolve_pointer(epath.Path("/runs/a"), "iter_4").as_posix()
    '/runs/a/iter_4'
    """
    if is_url(text) or os.path.isabs(text):
        path = storage_path("pointer", text)
        is_same_kind = is_url(text) == is_url(directory)
        return (
            directory / path.name
            if is_same_kind and list_directory(directory / path.name)
            else path
        )
    if is_url(directory) or not text.startswith(".."):
        return storage_path("pointer", f"{directory}/{text}")
    return storage_path("pointer", os.path.join(os.path.realpath(directory), text))


def remove_files(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Remove the files of one store, many with each request; those that do not exist are fine."""
    names = [os.fspath(path) for path in paths]
    if names and is_url(names[0]):
        _of_urls("remove_files")(names)
        return
    for name in names:
        pathlib.Path(name).unlink(missing_ok=True)


def local_copy(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return a local path unchanged, and for a URL of any fsspec scheme a local copy of the file,
    which is fetched again when the file at the URL changes.

    >>> local_copy("data/tokens.npy").name
    'tokens.npy'

    Raises:
      FileNotFoundError: there is no file at the URL. ConfigError: fsspec does not know the scheme,
        or the local path is a pipe or a device. StorageError: the request failed.
    """
    if is_url(path):
        return _of_urls("fetch")(path)
    check_regular(path)
    return pathlib.Path(path)


def apply_backend_args(
    name: str, path: str | None, *backend_args: Mapping[str, Any] | None
) -> str | None:
    """Return the path or URL that MMEngine's `backend_args` and `file_client_args` mean for the
    path in the argument `name`; an extra translates them.

    >>> apply_backend_args("ann_file", "data/coco/a.json", dict(backend="local"), None)
    'data/coco/a.json'
    """
    if backend_args.count(None) == len(backend_args):
        return path
    return load_provided("backend_args", "apply_backend_args")(name, path, *backend_args)


def _of_urls(function: str) -> Any:
    """Return a function for URLs from the extra that provides them."""
    return load_provided("url_files", function)


def check_local_path(name: str, path: str | os.PathLike[str]) -> str:
    """Return the absolute path; raise ConfigError if the argument `name` is a URL.

    >>> check_local_path("work_dir", "s3://bucket/run")
    Traceback (most recent call last):
    jengine.config.errors.ConfigError: `work_dir` must be a path on a local or mounted file system,
    got 's3://bucket/run'; ...
    """
    text = os.fspath(path)
    if match := _SCHEME.match(text):
        raise ConfigError(
            f"`{name}` must be a path on a local or mounted file system, got {text!r}; mount the "
            f"storage of {match[1]}:// as a directory, or copy to and from it"
        )
    return os.path.abspath(text)
