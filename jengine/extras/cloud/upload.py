"""Small files of a run whose work dir is a URL: written to a local directory, and copied to the URL
in the background.

Object stores cannot append, so everything that writes log lines, scalars, pictures or traces writes
to local files. A thread sends those that have changed, each as a whole.
"""

import atexit
import contextlib
import logging
import os
import pathlib
import shutil
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jengine.checkpoint.lock_holder import LOCK
from jengine.config.errors import ConfigError, read_seconds
from jengine.config.json_codec import decode_object, encode
from jengine.config.storage import (
    LARGE,
    LocalFiles,
    StorageError,
    UnsafeFileError,
    read_bytes,
    read_many,
)
from jengine.config.work_dir import SCORES, VERDICT
from jengine.extras.cloud.url_files import get_filesystem, is_inside

_LOGGER = logging.getLogger("jengine")
_INTERVAL = "JENGINE_UPLOAD_SECONDS"
_DIRECTORY = "JENGINE_LOCAL_DIR"
_PATIENCE = 60.0  # seconds for which files are sent again before a seal and at the end of a run
_BATCH = 2**26  # bytes that are read into memory at once
# Files that a resumed run only adds to: pictures, traces and event files. It need not have the
# earlier ones
_COMPLETE = (".png", ".jpg", ".pb", ".gz", ".npz")
# Files of other processes, which followers write at the URL
_FOREIGN = (f"/{SCORES}", f"/{VERDICT}", f"/{LOCK}")
_TEMPORARY = ".new"  # the end of the name of a file that is renamed when it is complete
# file with the URL, host and process of a local directory, so that the next run finds it
_SESSION = ".session"


def choose_local_dir(url: str) -> str:
    """Return a new local directory for the small files of a run at a URL, which need not exist.

    The environment variable `JENGINE_LOCAL_DIR` names the parent directory. By default that is
    `jengine-UID` in the directory for temporary files, or a new directory there if another user was
    first to make one of that name.
    """
    parent = os.environ.get(_DIRECTORY) or _make_parent()
    return os.path.join(os.path.abspath(parent), f"{os.path.basename(url)}-{uuid.uuid4().hex[:8]}")


class UploadedFiles(LocalFiles):
    """Small files of a run, which are written to `local_dir` and copied to a URL by a background
    thread.

    The thread sends files with another size or time than before. If that fails, it warns once and
    tries again. Call `close` to send the rest.

    Args:
      local_dir: the directory.
      url: where its files should be in the object store, by the same relative paths.
      check: called before files are sent; it raises an error if this run must not write there any
        more.
      interval: seconds between two passes; by default the environment variable
        `JENGINE_UPLOAD_SECONDS`, or 30.

    Examples:
      >>> files = UploadedFiles("/tmp/run", "gs://bucket/run")  # doctest: +SKIP
    """

    def __init__(
        self,
        local_dir: str,
        url: str,
        check: Callable[[], None] = lambda: None,
        interval: float | None = None,
    ) -> None:
        self._local_dir = pathlib.Path(local_dir)
        self._url = url.rstrip("/")
        self._check = check
        self._interval = read_seconds(_INTERVAL, 30, least=0.01) if interval is None else interval
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of each file when it was read
        self._mutex = threading.Lock()  # the thread, and saves of checkpoints
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_failing = False
        self._is_store_failing = False  # not a local file, nor `check`
        self._fetched = False

    def fetch(self, directory: str, skip: tuple[str, ...] = ()) -> None:
        """Fetch the files directly at the URL and those below `directory`, except `skip`, once.

        Pictures, traces and event files stay in the store: a run only adds others; and so do files
        of followers, which a run never sends. What a process
        on this machine that was killed has not sent of the files below `directory` is taken from
        its local directory, and sent.
        """
        if self._fetched:
            return
        self._fetched = True
        store = get_filesystem(self._url)
        prefix = self._url.partition("://")[2] + "/"
        found = [
            info
            for info in _list(store.ls, self._url)
            if info["name"].removeprefix(prefix) not in skip
        ]
        found += _list(
            lambda url, detail: store.find(url, detail=detail).values(), f"{self._url}/{directory}"
        )
        sizes = {
            info["name"].removeprefix(prefix): info["size"]
            for info in found
            if info["type"] == "file"
        }
        continued = [
            relative
            for relative in sizes
            if not (
                relative.endswith((*_COMPLETE, *_FOREIGN, "/"))
                or "tfevents" in relative
                or not is_inside(relative)
            )
        ]
        # Together, with one request for each: `get_file` would make three, one after the other
        for url, content in read_many(f"{self._url}/{relative}" for relative in continued).items():
            relative = url.removeprefix(f"{self._url}/")
            path = self._local_dir / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._sent[relative] = _describe(path)
        self._mark()
        for session in self._find_killed():
            if (session / directory).is_dir():
                self._take_over(session, directory, sizes)

    def _mark(self) -> None:
        self._local_dir.mkdir(parents=True, exist_ok=True)
        # the log may have made it, with the rights that the user's umask gives
        self._local_dir.chmod(0o700)
        (self._local_dir / _SESSION).write_text(encode(self._describe_session(os.getpid())))

    def _describe_session(self, process: int) -> dict[str, Any]:
        return {"url": self._url, "host": socket.gethostname(), "pid": process}

    def _find_killed(self) -> list[pathlib.Path]:
        """Return the local directories for this URL of processes of this machine that are gone, the
        oldest first.

        Only directories count that no other user can have made or written to: what is in them is
        sent to the URL.
        """
        parent = self._local_dir.parent
        name = self._local_dir.name.rpartition("-")[0]
        killed = []
        for entry in _scan(parent):
            # removed meanwhile, or half written
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if entry.name.rpartition("-")[0] == name and is_private(entry.path):
                    found = decode_object(read_bytes(pathlib.Path(entry.path, _SESSION)))
                    if found == self._describe_session(found["pid"]) and not _is_alive(
                        found["pid"]
                    ):
                        killed.append(
                            (
                                os.stat(entry.path, follow_symlinks=False).st_mtime,
                                pathlib.Path(entry.path),
                            )
                        )
        return [path for _, path in sorted(killed)]

    def _take_over(self, session: pathlib.Path, directory: str, sizes: Mapping[str, int]) -> None:
        """Copy the files below `directory` that continue those at the URL, and remove the
        session.
        """
        found = {path.relative_to(session).as_posix(): path for path in _list_files(session)}
        for relative, path in found.items():
            own = self._local_dir / relative
            is_newer = path.stat().st_size > (
                own.stat().st_size if own.exists() else sizes.get(relative, -1)
            )
            if (
                not relative.startswith(f"{directory}/")
                or not is_newer
                or _leads_out(path, session)
            ):
                continue
            if not own.exists() or read_bytes(path, LARGE).startswith(read_bytes(own, LARGE)):
                own.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, own)
        # these are only where they were written
        if not any(".process_" in relative for relative in found):
            shutil.rmtree(session, ignore_errors=True)

    def start(self) -> None:
        """Start the thread if it does not run."""
        if self._thread is None:
            atexit.unregister(self._remove)
            self._mark()
            self._done = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._done,), name="jengine-upload", daemon=True
            )
            self._thread.start()
            # Not `atexit`: the clients' own threads end before it
            # As concurrent.futures does
            threading._register_atexit(self.close)  # type: ignore[attr-defined]

    def send(self) -> None:
        """Send all files that have changed, complete up to now.

        Raises:
          Exception: of the store's client, if a request failed after its own retries.
            WorkDirLockedError: see `check`.
        """
        with self._mutex:
            self._is_store_failing = True
            self._check()
            store = get_filesystem(self._url)
            changed = self._find_changed()
            batch = {}
            size = 0
            unreadable: list[Exception] = []
            for relative, (path, description) in list(changed.items()):
                try:
                    if _leads_out(path, self._local_dir):
                        raise OSError(
                            f"{path} is a link to a file elsewhere, which may be somebody else's"
                        )
                    content = None if description[0] > _BATCH else read_bytes(path)
                except (OSError, StorageError, UnsafeFileError) as error:
                    # the others must be sent all the same
                    del changed[relative]
                    if not isinstance(error, FileNotFoundError):  # removed meanwhile
                        unreadable.append(error)
                    continue
                if content is None:
                    store.put_file(str(path), f"{self._url}/{relative}")
                    continue
                batch[f"{self._url}/{relative}"] = content
                size += description[0]
                if size > _BATCH:
                    store.pipe(batch)
                    batch = {}
                    size = 0
            if batch:
                store.pipe(batch)
            self._sent.update(
                {relative: description for relative, (_, description) in changed.items()}
            )
            self._is_store_failing = False
            if unreadable:
                raise unreadable[0]

    def close(self, *, keep: bool = True) -> None:
        """Send what is left and end the thread; an error is logged after a minute.

        Args:
          keep: False removes the local files at the end of the process if all have been sent.
        """
        if self._thread is None:
            return
        thread = self._thread
        self._thread = None
        self._done.set()
        thread.join(_PATIENCE)
        if thread.is_alive() or self._is_failing:
            _LOGGER.error(
                "some files of the run were not sent to %s: they are in %s",
                self._url,
                self._local_dir,
            )
        elif not keep:
            atexit.register(self._remove)

    def _run(self, done: threading.Event) -> None:
        while not done.wait(self._interval):
            self.try_to_send()
        self.try_to_send(_PATIENCE)

    def send_all(self) -> None:
        """Send all changed files, for a minute again while the store refuses them."""
        self.try_to_send(_PATIENCE)

    def try_to_send(self, patience: float = 0.0) -> bool:
        """Send all changed files, for `patience` seconds again while the store refuses them.

        Returns:
          False after an error, which is logged when it is new.
        """
        deadline = time.monotonic() + patience
        while (
            not (is_sent := self._send_or_log())
            and self._is_store_failing
            and time.monotonic() < deadline
        ):
            time.sleep(min(1.0, self._interval))
        return is_sent

    def _send_or_log(self) -> bool:
        try:
            self.send()
        except ConfigError:  # another run has taken over, which the lock has logged
            self._is_failing = True
            self._is_store_failing = False
            return False
        except Exception as error:
            if not self._is_failing:
                self._is_failing = True
                reason = " ".join(str(error).split()) or type(error).__name__
                _LOGGER.warning(
                    "files of the run could not be sent to %s, which is tried again: %s",
                    self._url,
                    reason,
                )
            return False
        if self._is_failing:
            self._is_failing = False
            _LOGGER.info("files of the run are sent to %s again.", self._url)
        return True

    def _find_changed(self) -> dict[str, tuple[pathlib.Path, tuple[int, int]]]:
        """Return the changed files by relative path, described before they are read: they may
        grow meanwhile.
        """
        changed = {}
        for path in _list_files(self._local_dir):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                relative = path.relative_to(self._local_dir).as_posix()
                description = _describe(path)
                if (
                    not relative.endswith((_TEMPORARY, _SESSION))
                    and self._sent.get(relative) != description
                ):
                    changed[relative] = path, description
        return changed

    def _remove(self) -> None:
        shutil.rmtree(self._local_dir, ignore_errors=True)


def _make_parent() -> str:
    path = os.path.join(tempfile.gettempdir(), f"jengine-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if is_private(path):
        return path
    new = tempfile.mkdtemp(prefix="jengine-")
    _LOGGER.warning(
        "%s must be a directory that only you can write to, but it is a link, or another user "
        "made it or can write to it: files of this run are in %s instead, where a restarted run "
        "does not find what a killed one left",
        path,
        new,
    )
    return new


def is_private(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a directory of this user that nobody else can write to.

    False for a link to one.
    """
    status = os.lstat(path)
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o022
    )


def _scan(directory: pathlib.Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return list(entries)
    return []


def _list_files(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the files below a directory, without entering links to directories."""
    for folder, _, names in os.walk(directory):
        yield from (
            path for name in sorted(names) if (path := pathlib.Path(folder, name)).is_file()
        )


def _leads_out(path: pathlib.Path, directory: pathlib.Path) -> bool:
    return path.is_symlink() and not pathlib.Path(os.path.realpath(path)).is_relative_to(
        os.path.realpath(directory)
    )


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # of another user
    return True


def _describe(path: pathlib.Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _list(function: Callable[..., Any], url: str) -> list[dict[str, Any]]:
    try:
        return list(function(url, detail=True))
    except FileNotFoundError:
        return []
