"""Lock on a URL of object storage, which has no file locks: a lease that the run renews while it
lives.

The lease is an object with the owner and a duration. Each write of it names the version that it
replaces, and the store refuses the write if another one came first: `ifGenerationMatch` on Google
Cloud Storage, `If-Match` and `If-None-Match` on S3. Nobody compares clocks of two machines: a run
that finds a lease watches it by its own clock, and takes it over only if its owner has not renewed
it for the whole duration. The age of a lease is told by the store's clock.
"""

import atexit
import contextlib
import datetime
import email.utils
import logging
import math
import os
import threading
import time
import uuid
from typing import Any

import jax

from jengine.checkpoint.lock_holder import (
    LOCK,
    WorkDirLockedError,
    describe_holder,
    parse_holder,
    this_process,
)
from jengine.config.errors import read_seconds
from jengine.config.json_codec import decode, encode
from jengine.extras.cloud.url_files import get_filesystem

_LOGGER = logging.getLogger("jengine")
_VARIABLE = "JENGINE_LEASE_SECONDS"
_RENEWALS = 3  # per duration, so that one or two that fail lose nothing
_MOST_SECONDS = 86_400  # of the duration that a lease names
_STOPS = "this run was paused or cut off for so long that it lost its lock, and stops"


class Lease:
    """Exclusive access to a URL, from `acquire` to `release`, or until its duration after the
    process is gone.

    With several processes, the first one holds the lease for all.

    Args:
      url: the directory, `gs://bucket/run` or `s3://bucket/run`.
      seconds: the duration; by default the environment variable `JENGINE_LEASE_SECONDS`, or 60.

    Examples:
      >>> lease = Lease("gs://bucket/run")  # doctest: +SKIP
      >>> lease.acquire()  # doctest: +SKIP
    """

    def __init__(self, url: str | os.PathLike[str], seconds: float | None = None) -> None:
        self._url = os.fspath(url)
        self._seconds = read_seconds(_VARIABLE, 60, least=0.1) if seconds is None else seconds
        self._object = _make_object(f"{self._url}/{LOCK}")
        self._entries = {**this_process(), "token": uuid.uuid4().hex, "seconds": self._seconds}
        self._version: str | None = None  # of the object while this run holds it
        self._renewed = -math.inf  # by the monotonic clock
        self._lost: WorkDirLockedError | None = None
        self._mutex = threading.Lock()
        self._done = threading.Event()  # ends the thread

    def acquire(self) -> None:
        """Acquire the lease if this object does not hold it.

        Take over that of a killed run with a warning.

        If there is a lease, this waits until its owner renews it, at most for its duration.

        Raises:
          WorkDirLockedError: another run holds it; the message names the process and host.
        """
        if self._version is not None or jax.process_index() != 0:
            return
        # A lease that was lost may be acquired again, by the next `train` of the same process.
        self._lost = None
        found, version = self._object.read()
        if version is not None:
            self._wait_until_expired(parse_holder(found), version)
        # Conditional on the version that was read: of two processes that find an expired lease, the
        # store lets one write.
        self._write(version)
        self._done = threading.Event()
        threading.Thread(
            target=self._keep, args=(self._done,), name="jengine-lease", daemon=True
        ).start()
        atexit.register(self.release)

    def release(self) -> None:
        """Remove the lease.

        Do nothing if this object, or a process that it was forked from, does not hold it.
        """
        if self._entries["pid"] != os.getpid():
            return
        atexit.unregister(self.release)
        self._done.set()
        with self._mutex:
            version = self._version
            self._version = None
        if version is not None:

            def remove() -> None:
                with contextlib.suppress(Exception):  # then it expires
                    self._object.remove(version)

            thread = threading.Thread(target=remove, daemon=True)
            thread.start()
            thread.join(self._seconds)  # a store that does not answer must not keep the process

    def check(self, *, before_write: bool = False) -> None:
        """Raise WorkDirLockedError if another run has taken over, as after a pause longer than the
        duration.

        Args:
          before_write: ask the store if the last renewal was some time ago; without it nothing
            waits.
        """
        if (
            before_write
            and time.monotonic() - self._renewed > self._seconds / 2
            and self._lost is None
        ):
            self._renew()
        if self._lost is not None:
            raise self._lost

    def _wait_until_expired(self, holder: dict[str, Any], version: str) -> None:
        """Return when the lease has expired.

        Raise WorkDirLockedError if the owner renews it meanwhile.
        """
        seconds = holder.get("seconds")
        duration = self._seconds
        if isinstance(seconds, int | float) and 0 < seconds < _MOST_SECONDS:
            duration = float(seconds)
        deadline = time.monotonic() + duration
        _LOGGER.info(
            "%s is locked by %s: waiting at most %.0f s to see whether that run still trains.",
            self._url,
            describe_holder(holder),
            duration,
        )
        while (rest := deadline - time.monotonic()) > 0:
            time.sleep(min(rest, duration / _RENEWALS / 2))
            found, current = self._object.read()
            if current is None:
                return  # released; `_write` fails if a third run was faster
            if current != version:
                raise WorkDirLockedError(self._url, parse_holder(found))
        _LOGGER.warning(
            "%s: the previous run (%s) ended without releasing its lock; taking over",
            self._url,
            describe_holder(holder),
        )

    def _write(self, version: str | None) -> None:
        """Replace this version of the object (None: there is none) by one of this run."""
        started = time.monotonic()
        # other bytes each time, for S3's ETag
        content = encode({**self._entries, "renewed": time.time()}).encode()
        try:
            try:
                self._version = self._object.write(content, version)
            except FileExistsError:
                found, self._version = self._object.read()
                if self._version is None:  # somebody has removed it
                    self._version = self._object.write(content, None)
                elif found != content:  # equal: the answer to an earlier attempt was lost
                    raise
        except FileExistsError:
            self._version = None
            raise WorkDirLockedError(self._url, parse_holder(self._object.read()[0])) from None
        self._renewed = started

    def _renew(self) -> None:
        # The keeper's thread and the loop both renew; the second would otherwise take the version
        # of the first for another run.
        with self._mutex:
            if self._version is None or self._lost is not None:
                return
            try:
                self._write(self._version)
            except WorkDirLockedError as error:
                # Stored, not raised: this is the keeper's thread, and the loop raises it at its
                # next check.
                self._lost = WorkDirLockedError(self._url, error.holder, _STOPS)
                _LOGGER.error("%s", self._lost)

    def _keep(self, done: threading.Event) -> None:
        """Renew the lease until it is released or lost; runs in a thread."""
        is_reachable = True
        while not done.wait(self._seconds / _RENEWALS) and self._lost is None:
            try:
                self._renew()
                is_reachable = True
            except Exception as error:
                # the next renewal may succeed; without one, `check` fails before a write
                if is_reachable:
                    _LOGGER.warning("the lock of %s could not be renewed: %s", self._url, error)
                is_reachable = False


def is_leased(url: str | os.PathLike[str]) -> bool:
    """Return whether a run is training at a URL: whether the last renewal is recent, by the
    store's clock.
    """
    lease = _make_object(f"{os.fspath(url)}/{LOCK}")
    seconds = parse_holder(lease.read()[0]).get("seconds")
    if not isinstance(seconds, int | float):
        return False
    with contextlib.suppress(FileNotFoundError):  # released meanwhile
        return lease.find_age() < seconds + 1.0  # HTTP headers have whole seconds
    return False


class _GoogleObject:
    """Object whose writes name the generation that they replace.

    FileExistsError if it is another.
    """

    def __init__(self, url: str) -> None:
        self._filesystem = get_filesystem(url)
        self._bucket, _, self._key = url.partition("://")[2].partition("/")

    def read(self) -> tuple[bytes, str | None]:
        """Return content and generation, which is None if there is no object."""
        try:
            headers, content = self._filesystem.call(
                "GET", "b/{}/o/{}", self._bucket, self._key, alt="media"
            )
        except FileNotFoundError:
            return b"", None
        return content, headers["x-goog-generation"]

    def find_age(self) -> float:
        """Return the seconds since the last write by the store's clock."""
        headers, content = self._filesystem.call("GET", "b/{}/o/{}", self._bucket, self._key)
        updated = datetime.datetime.fromisoformat(str(decode(content)["updated"]))
        return (email.utils.parsedate_to_datetime(headers["Date"]) - updated).total_seconds()

    def write(self, content: bytes, version: str | None) -> str:
        path = self._filesystem.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
        settings = dict(
            uploadType="media", name=self._key, ifGenerationMatch=version or "0", json_out=True
        )
        return str(
            self._filesystem.call("POST", path, self._bucket, data=content, **settings)[
                "generation"
            ]
        )

    def remove(self, version: str) -> None:
        self._filesystem.call(
            "DELETE", "b/{}/o/{}", self._bucket, self._key, ifGenerationMatch=version
        )


class _S3Object:
    """Object whose writes name the ETag that they replace; FileExistsError if it is another."""

    def __init__(self, url: str) -> None:
        self._filesystem = get_filesystem(url)
        bucket, _, key = url.partition("://")[2].partition("/")
        self._names = {"Bucket": bucket, "Key": key}

    def read(self) -> tuple[bytes, str | None]:
        """Return content and ETag, which is None if there is no object."""
        from fsspec.asyn import sync

        async def read() -> tuple[bytes, str]:  # one request for both, so that they belong together
            answer = await self._filesystem._call_s3("get_object", **self._names)
            async with answer["Body"] as body:
                return await body.read(), answer["ETag"]

        try:
            return sync(self._filesystem.loop, read)
        except FileNotFoundError:
            return b"", None

    def find_age(self) -> float:
        """Return the seconds since the last write by the store's clock."""
        answer = self._filesystem.call_s3("head_object", **self._names)
        now = email.utils.parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return float((now - answer["LastModified"]).total_seconds())

    def write(self, content: bytes, version: str | None) -> str:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            answer = self._filesystem.call_s3(
                "put_object", Body=content, **self._names, **condition
            )
        except OSError as error:
            response = getattr(error.__cause__, "response", {})
            # 404: it does not exist
            if response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (404, 412):
                raise FileExistsError(str(error)) from error
            raise
        return str(answer["ETag"])

    def remove(self, version: str) -> None:
        self._filesystem.call_s3("delete_object", **self._names, IfMatch=version)


def _make_object(url: str) -> _GoogleObject | _S3Object:
    return _S3Object(url) if url.startswith("s3://") else _GoogleObject(url)
