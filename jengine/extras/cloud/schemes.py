"""URLs of buckets, `gs://` and `s3://`: what a run needs for a work dir there."""

import os
import posixpath
from pathlib import PurePath
from typing import Any

import jax
from etils import epath

from jengine.config.errors import ConfigError, require_extra
from jengine.config.storage import PathScheme, plain_name
from jengine.extras.cloud import staging
from jengine.extras.cloud.lease import Lease, is_leased
from jengine.extras.cloud.upload import UploadedFiles, choose_local_dir
from jengine.extras.cloud.url_files import make_timeout

# bytes: a store has names of at most 1,024, and those of checkpoint files are longer
_MAX_KEY = 800


class _Buckets:
    """Buckets of one kind of store.

    Args:
      package: the fsspec implementation.
      protocols: the names of the scheme in fsspec.
      is_staged: whether Orbax has no driver for the store.
    """

    def __init__(self, package: str, protocols: tuple[str, ...], is_staged: bool) -> None:
        self._package = package
        self._protocols = protocols
        self.is_staged = is_staged

    def make_path(self, name: str, url: str) -> epath.Path:
        """Return the path for the argument `name`, and set up the client of the store.

        Raises:
          ConfigError: a URL without a bucket, or with a name that some library misreads.
        """
        scheme, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        if not bucket:
            raise ConfigError(
                f"`{name}` must have the name of a bucket, like '{scheme}://bucket/run', got "
                f"{url!r}"
            )
        if plain_name(key) != key.replace("/", "_"):
            raise ConfigError(
                f"`{name}` must be a URL without characters that libraries for buckets misread, "
                f"such as '*' and '#', got {url!r}"
            )
        if len(key.encode()) > _MAX_KEY:
            raise ConfigError(
                f"`{name}` must be a URL with at most {_MAX_KEY} bytes after the bucket, got "
                f"{url!r}"
            )
        self.prepare()
        return epath.Path(f"{scheme}://{bucket}{posixpath.normpath(f'/{key}').rstrip('/')}")

    def prepare(self) -> None:
        """Set up the client for all that open a URL, also `etils.epath`."""
        with require_extra("cloud", f"{self._protocols[0]}:// paths require {self._package}"):
            __import__(self._package)
        import fsspec

        # The packages keep listings forever by default, also those that `etils.epath` opens for
        # Orbax
        settings: dict[str, Any] = {"use_listings_cache": False}
        if self._package == "gcsfs":
            settings["session_kwargs"] = {"timeout": make_timeout()}
        for protocol in self._protocols:
            for name, value in settings.items():
                fsspec.config.conf.setdefault(protocol, {}).setdefault(name, value)

    def check_processes(self, name: str, url: str | os.PathLike[str]) -> None:
        """Raise ConfigError if several processes cannot save to `url`."""
        if self.is_staged and jax.process_count() > 1:
            raise ConfigError(
                f"`{name}` must be a local path or a URL of gs:// with {jax.process_count()} "
                f"processes, got {os.fspath(url)!r}: Orbax has no driver for this store, and "
                "cannot merge files of several hosts"
            )

    make_lock = staticmethod(Lease)
    is_locked = staticmethod(is_leased)
    choose_local_dir = staticmethod(choose_local_dir)
    send_files = staticmethod(UploadedFiles)

    def find_local(self, directory: PurePath, *, arrays: bool) -> PurePath:
        """Return where Orbax can read `directory`: a verified local copy, or itself."""
        if not self.is_staged and (jax.process_count() > 1 or not arrays):
            return directory
        return staging.copy_arrays(directory)

    upload_after = staticmethod(staging.upload_after)


gs: PathScheme = _Buckets("gcsfs", ("gs", "gcs"), is_staged=False)
s3: PathScheme = _Buckets("s3fs", ("s3", "s3a"), is_staged=True)
