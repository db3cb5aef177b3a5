"""Keeps on the device the numbers that do not change from one iteration to the next.

Each host number that enters a compiled step costs a few microseconds at every call. Most numbers of an optimizer stay
as they are while a schedule moves the learning rate: those are sent once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

_STANDS_AFTER = 3  # calls with the same value, before it is sent: what moves all the time is never sent
_MOST = 1000


class _Kept:
    """A number as it was last.

    Attributes:
      value: it, as it was given.
      raw: its bytes.
      fixed: whether its array cannot be written to, so that it is known by identity.
      calls: how often it has been the same.
      stands_after: calls after which it is sent; more each time that it was sent in vain.
      sent: it on the device.
    """

    __slots__ = ("calls", "fixed", "raw", "sent", "stands_after", "value")

    def __init__(self) -> None:
        self.value: np.ndarray | np.generic | None = None
        self.raw = b""
        self.fixed = False
        self.calls = 0
        self.stands_after = _STANDS_AFTER
        self.sent: jax.Array | None = None


class StandingNumbers:
    """Replaces unchanged host arrays by device arrays of the same value, shape and dtype.

    Args:
      put: sends a host array to the device without tying it there, so that nothing is compiled again.
    """

    def __init__(self, put: Callable[[Any], jax.Array]) -> None:
        self._put = put
        self._kept: dict[str, _Kept] = {}

    def __call__(self, numbers: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """The numbers as the next call of the step takes them.

        Args:
          numbers: host numbers by name; mappings of such are gone through, anything else passes.
          prefix: of the names, for the mappings inside.
        """
        sent = {}
        for name, value in numbers.items():
            kept = self._kept.get(name) if not prefix else None
            if kept is not None and kept.value is value and kept.fixed and kept.sent is not None:
                sent[name] = kept.sent  # the usual case, without a call
            else:
                sent[name] = self._one(f"{prefix}{name}" if prefix else name, value)
        return sent

    def _one(self, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray | np.generic):
            return self(value, f"{name}.") if isinstance(value, Mapping) else value
        kept, raw = self._kept.get(name), value.tobytes()
        if kept is None:
            kept = self._kept[name] = _Kept()
        if kept.raw != raw:
            if kept.sent is not None:  # to send it costs as much as twenty calls with a number of the host
                kept.stands_after = min(4 * kept.stands_after, _MOST)
            kept.raw, kept.calls, kept.sent = raw, 0, None
        kept.value, kept.fixed = value, not value.flags.writeable
        if kept.sent is None:
            kept.calls += 1
            if kept.calls <= kept.stands_after:
                return value
            kept.sent = self._put(value)
        return kept.sent
