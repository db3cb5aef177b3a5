"""MMEngine's `backend_args` and `file_client_args`: here a URL alone selects the storage."""

from collections.abc import Mapping
from typing import Any

from jengine.config.errors import ConfigError
from jengine.config.storage import is_url

_SCHEMES: dict[Any, tuple[str, ...]] = {  # by backend
    **dict.fromkeys(("local", "disk", "LocalBackend", "HardDiskBackend"), ()),
    **dict.fromkeys(("petrel", "ceph", "s3", "PetrelBackend", "CephBackend"), ("s3", "gs")),
    **dict.fromkeys(("http", "HTTPBackend"), ("http", "https")),
}
_ADVICE = (
    "leave backend_args out, and write a path or a URL, such as 's3://bucket/file' or "
    "'gs://bucket/file'"
)


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
      path: file or directory; with None only the settings are checked.
      backend_args, file_client_args: None, or one of them is a dict with `backend` and perhaps
        `path_mapping`.

    Raises:
      ConfigError: the backend has no equivalent, the path is none of its URLs, or both dicts are
        given.
    """
    _check(backend_args, file_client_args)
    if path is None:
        return None
    settings = backend_args or file_client_args or {}
    backend = settings.get("backend")
    found = path
    mapping = settings.get("path_mapping") or {}
    found = next(
        (new + found.removeprefix(old) for old, new in mapping.items() if found.startswith(old)),
        found,
    )
    schemes = _SCHEMES.get(backend)
    if backend is None or (found.partition("://")[0] in schemes if schemes else not is_url(found)):
        return found
    example = f"like '{schemes[0]}://...'" if schemes else "of the local file system"
    raise ConfigError(
        f"`{name}` must be a path {example} with backend={backend!r}, got {path!r}; {_ADVICE}"
    )


def _check(
    backend_args: Mapping[str, Any] | None, file_client_args: Mapping[str, Any] | None = None
) -> None:
    """Raise ConfigError if `apply_backend_args` would refuse the settings for every path."""
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
