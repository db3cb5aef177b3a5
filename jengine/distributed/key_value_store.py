"""Declare the interface of the key-value store that the processes of a run share."""

from typing import Protocol


class KeyValueStore(Protocol):
    """Describe the methods used of the client of JAX's coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Set a value; raise an error if the key exists, unless `allow_overwrite`."""

    def key_value_delete(self, key: str) -> None:
        """Delete a key and all keys below it."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Return all keys below `key`, with their values."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a value and return it; raise an error after the timeout."""
