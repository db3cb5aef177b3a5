"""Signs of life, for the networks on which an exchange with a process that is dead just never ends."""

from jengine.distributed.key_value_store import Store

_BEATS = "jengine/beats"
_LEFT = "left"
_PER_SILENCE = 10  # signs in the time after which silence is the end


class Pulse:
    """Gives signs of life, and listens for those of the next process: each is heard by one, however many there are.

    Args:
      store: the client of the coordination service.
      index: this process.
      count: how many there are.
      silence: seconds without a sign after which a process is gone.
    """

    def __init__(self, store: Store, index: int, count: int, silence: float) -> None:
        self.silence = silence
        self.next = (index + 1) % count
        self._store = store
        self._own = f"{_BEATS}/{index}/now"
        self._beats = 0
        self._due: float | None = None
        self._sign: str | None = None  # the last one of the next process; None before the first
        self._heard = 0.0

    def beat(self, now: float) -> bool:
        """Call often.

        Args:
          now: seconds, on any clock.

        Returns:
          Whether the next process is gone: it gave signs and, without having left, gives none any more.
        """
        if self._due is not None and now < self._due:
            return False
        self._due = now + self.silence / _PER_SILENCE
        self._beats += 1
        self._store.key_value_set(self._own, str(self._beats), True)
        found = self._store.key_value_dir_get(f"{_BEATS}/{self.next}")
        sign = found[0][1] if found else None
        if sign != self._sign or sign in (None, _LEFT):
            self._sign, self._heard = sign, now
        return now - self._heard > self.silence

    def stop(self) -> None:
        """Call when this process comes to its end as it should: what follows is no silence."""
        self._store.key_value_set(self._own, _LEFT, True)
