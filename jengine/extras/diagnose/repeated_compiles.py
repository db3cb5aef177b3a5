"""Lines of the user's code that compile again and again, such as a `jax.jit` in each epoch."""

import collections
import math
import sys
import traceback
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

from jengine.extras.diagnose.stacks import describe_line, find_call
from jengine.hooks.runner_protocol import RunnerProtocol

_EVENT = "/jax/core/compile/backend_compile_duration"
_ITERATIONS = 3  # those that compile at a line which is named


def _trace_state() -> Any:
    return get_opaque_trace_state(convention="flax")


class RepeatedCompiles:
    """Watch that names, once each, the lines that compile in three iterations.

    JAX reports a compilation in the thread that makes it, so that a run without any costs nothing.
    See `IterTimerHook`.
    """

    def __init__(self) -> None:
        self._runner: Any = None
        self._outside: Any = None  # of all traces
        self._seen: dict[Any, list[int]] = collections.defaultdict(list)

    def start(self, runner: RunnerProtocol) -> None:
        """Start to listen."""
        self._runner = runner
        self._seen.clear()
        self._outside = _trace_state()
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def request(self, runner: RunnerProtocol) -> None:
        """Request nothing."""

    def act(self, runner: RunnerProtocol, completed: int, requests: list[None]) -> float:
        """Do nothing."""
        return math.inf

    def end(self, runner: RunnerProtocol, failed: bool) -> None:
        """Stop listening."""
        if self._runner is not None:
            jax.monitoring.unregister_event_duration_listener(self._note)
            self._runner = None

    def _note(self, event: str, duration_secs: float, **details: Any) -> None:
        # what a trace compiles comes with the program that is traced
        if event != _EVENT or _trace_state() != self._outside:
            return
        calls = traceback.walk_stack(sys._getframe(1))
        call = find_call(calls, lambda call: call[0].f_code.co_filename)
        if call is None:
            return
        frame, line = call
        file = frame.f_code.co_filename
        fun_name = details.get("fun_name", "")
        iterations = self._seen[fun_name, file, line]
        if self._runner.iter in iterations or len(iterations) >= _ITERATIONS:
            return
        iterations.append(self._runner.iter)
        if len(iterations) == _ITERATIONS:
            self._runner.logger.warning(
                f"`{fun_name}` is compiled again and again, in the iterations "
                f"{', '.join(map(str, iterations))}, at "
                f"{describe_line(file, line, frame.f_code.co_name)}. Call `jax.jit` once, outside "
                "of what is called again, and keep the shapes of the arguments."
            )
