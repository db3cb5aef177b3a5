"""Count the programs that this process compiles, to detect calls that compile."""

import jax


class CompilationCounter:
    """Count compiled programs, those found in the persistent cache included.

    Attributes:
      count: programs compiled since `install` was called first. Compare it before and after a call.
    """

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        self._installed = False

    def install(self) -> None:
        """Start counting; further calls do nothing."""
        if not self._installed:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)
            self._installed = True

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == self._EVENT


compilation_counter = CompilationCounter()
