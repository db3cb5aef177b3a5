"""Counts what this process compiles, so that a call that compiled is told from one that did not."""

import jax


class Compiles:
    """How many programs were compiled since `listen` was called first; those found in the cache included.

    Attributes:
      count: to be read before and after a call: it costs nothing.
    """

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        self._listening = False

    def listen(self) -> None:
        """Begins to count; once is enough."""
        if not self._listening:
            jax.monitoring.register_event_duration_secs_listener(self._note)
            self._listening = True

    def _note(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == self._EVENT


COMPILES = Compiles()
