"""The message hub as it was at one moment, to be read while the run goes on."""

import math
from collections.abc import Callable
from typing import Any

from jengine.errors import UnknownNameError, closest
from jengine.logging.history import HistoryBuffer


class HubSnapshot:
    """What the hub held when it was asked for, to read and then to `close`, before a later one is read.

    Args:
      histories: of the hub, not yet with what waits for the device.
      settle: of an iteration, adds to the histories what waits up to it; the first call waits for the device.
      infos: of the hub.
    """

    def __init__(
        self, histories: dict[str, HistoryBuffer], settle: Callable[[float], None], infos: dict[str, Any]
    ) -> None:
        self._histories = histories
        self._settle = settle
        self._settled, self._iteration = -math.inf, math.inf
        self.runtime_info = infos

    def at(self, iteration: float) -> None:
        """Leaves out the scalars that later iterations gave, until a later one is asked for; by default none is."""
        self._iteration = iteration

    @property
    def log_scalars(self) -> dict[str, HistoryBuffer]:
        """All histories by key; waits for what was still in the making."""
        if self._settled < self._iteration:
            self._settled = self._iteration
            self._settle(self._iteration)
        return self._histories

    def get_scalar(self, key: str) -> HistoryBuffer:
        """The history of the scalar `key`.

        Raises:
          KeyError: no scalar has that name; the message says the closest.
        """
        if key not in self.log_scalars:
            raise UnknownNameError(f"no scalar is called {key!r}{closest(key, self._histories)}")
        return self._histories[key]

    def get_info(self, key: str, default: Any = None) -> Any:
        """The info `key`, or `default` where there is none."""
        return self.runtime_info.get(key, default)

    def close(self) -> None:
        """Says that it was read. What waited is in the histories then, whether or not anybody looked."""
        self.at(math.inf)
        _ = self.log_scalars
