"""Hold the metrics of a chunk of training steps, as hooks receive them."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class ChunkMetrics:
    """Hold the metrics of the K steps of a chunk.

    Attributes:
      values: real[K] by name, device arrays that may be pending.
      is_update: bool[K], which steps updated the parameters.
      update_only: names that only steps that update report; their other values are undefined.
    """

    values: Mapping[str, jax.Array]
    is_update: np.ndarray
    update_only: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """The number of steps K."""
        return len(self.is_update)

    def reported(self, name: str) -> np.ndarray | None:
        """Return which steps report the metric, bool[K]; None for all of them."""
        return self.is_update if name in self.update_only else None

    def last(self) -> dict[str, jax.Array]:
        """Return the metrics of the last step, as a call of that step alone returns them."""
        names = (name for name in self.values if name not in self.update_only or self.is_update[-1])
        return {name: self.values[name][-1] for name in names}
