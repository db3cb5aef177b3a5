"""Detect dead processes by missing heartbeats, for networks on which an exchange with one never returns."""

from jengine.distributed.key_value_store import KeyValueStore

_HEARTBEATS = "jengine/heartbeats"
_STOPPED = "stopped"
_BEATS_PER_TIMEOUT = 10


class Heartbeat:
    """Send heartbeats, and watch those of the next process.

    Each process watches one other, so the load does not grow with the number of processes.

    Args:
      store: the client of the coordination service.
      index: index of this process.
      count: number of processes.
      timeout: seconds without a heartbeat after which a process counts as dead.

    Attributes:
      watched: index of the process whose heartbeats are watched.
    """

    def __init__(self, store: KeyValueStore, index: int, count: int, timeout: float) -> None:
        self.timeout = timeout
        self.watched = (index + 1) % count
        self._store = store
        self._key = f"{_HEARTBEATS}/{index}/latest"
        self._beats = 0
        self._next_time: float | None = None
        self._last_value: str | None = None  # of the watched process; None before its first heartbeat
        self._last_change = 0.0

    def beat(self, now: float) -> bool:
        """Send a heartbeat if one is due, and check the watched process; call this often.

        Args:
          now: seconds, on any clock.

        Returns:
          True if the watched process is dead: it has sent heartbeats, and stopped sending them without `stop`.
        """
        if self._next_time is not None and now < self._next_time:
            return False
        self._next_time = now + self.timeout / _BEATS_PER_TIMEOUT
        self._beats += 1
        self._store.key_value_set(self._key, str(self._beats), True)
        entries = self._store.key_value_dir_get(f"{_HEARTBEATS}/{self.watched}")
        value = entries[0][1] if entries else None
        if value != self._last_value or value in (None, _STOPPED):
            self._last_value, self._last_change = value, now
        return now - self._last_change > self.timeout

    def stop(self) -> None:
        """Announce that this process ends normally and sends no more heartbeats."""
        self._store.key_value_set(self._key, _STOPPED, True)
