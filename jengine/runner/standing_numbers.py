"""Keeps on the device the numbers that do not change from one iteration to the next.

Each host number that enters a compiled step costs a few microseconds at every call. Most numbers of an optimizer stay
as they are while a schedule moves the learning rate: those are sent once.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

_STANDS_AFTER = 3  # calls with the same value, before it is sent: what moves all the time is never sent twice


@dataclasses.dataclass
class _Kept:
    value: np.ndarray | np.generic
    raw: bytes
    calls: int = 1
    sent: jax.Array | None = None


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
            # the usual case, without a call; an array that can be written to may have another value by now
            if kept is not None and kept.sent is not None and kept.value is value and not value.flags.writeable:
                sent[name] = kept.sent
            else:
                sent[name] = self._one(f"{prefix}{name}", value)
        return sent

    def _one(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self(value, f"{name}.")
        if not isinstance(value, np.ndarray | np.generic):
            return value
        kept, raw = self._kept.get(name), value.tobytes()
        if kept is None or kept.raw != raw:
            self._kept[name] = _Kept(value, raw)
            return value
        if kept.sent is None:
            kept.calls += 1
            if kept.calls <= _STANDS_AFTER:
                return value
            kept.sent = self._put(value)
        kept.value = value  # the same number, perhaps in an array of its own: to be known again at once
        return kept.sent
