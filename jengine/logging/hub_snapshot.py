"""The message hub as it was at one moment, to be read while the run goes on."""

from collections.abc import Callable
from typing import Any

from jengine.errors import UnknownNameError, closest
from jengine.logging.history import HistoryBuffer


class HubSnapshot:
    """What the hub held when it was asked for, to read once and then to `close`, before a later one is read.

    Args:
      histories: of the hub, not yet with what waits for the device.
      settle: adds what waits to the histories; it waits for the device.
      infos: of the hub.
    """

    def __init__(self, histories: dict[str, HistoryBuffer], settle: Callable[[], None], infos: dict[str, Any]) -> None:
        self._histories = histories
        self._settle: Callable[[], None] | None = settle
        self.runtime_info = infos

    @property
    def log_scalars(self) -> dict[str, HistoryBuffer]:
        """All histories by key; waits for what was still in the making."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle()
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
        _ = self.log_scalars
