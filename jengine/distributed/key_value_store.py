"""What is used of the client of JAX's coordination service."""

from typing import Protocol


class Store(Protocol):
    """The client, or what stands in for it in a test."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a value; an error if there is one and it may not be overwritten."""

    def key_value_delete(self, key: str) -> None:
        """Removes a value, and those below it."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All values below a key."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for a value; an error after the time."""
