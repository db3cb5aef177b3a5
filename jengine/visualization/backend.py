"""What a visualization backend is."""

import abc
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.visualization.convert import Histogram


class BaseVisBackend(abc.ABC):
    """Writes what the visualizer gets to one place: files, a server.

    A backend opens nothing before it has something to write, and may be written to again after `close`.

    Args:
      save_dir: the directory for its files; it need not exist.
    """

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        self.save_dir = pathlib.Path(save_dir)

    @abc.abstractmethod
    def add_config(self, config: str) -> None:
        """Writes the config, the text of a Python file."""

    @abc.abstractmethod
    def add_graph(self, graph: str) -> None:
        """Writes the description of the model as text."""

    @abc.abstractmethod
    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Writes `image`, uint8[H, W, C] with C of 1, 3 (RGB) or 4 (RGBA)."""

    @abc.abstractmethod
    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None) -> None:
        """Writes several values of one step.

        Args:
          scalar_dict: host numbers by name.
          step: what they are plotted against.
          file_path: a file below `save_dir` that a backend of files appends them to as well.
        """

    def add_scalar(self, name: str, value: Any, step: int = 0) -> None:
        """Writes one value of one step."""
        self.add_scalars({name: value}, step)

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Writes a histogram; where a backend knows none its mean, deviation and range, as scalars."""
        low, high = histogram.edges[0], histogram.edges[-1]
        numbers = dict(mean=histogram.mean, std=histogram.std, min=float(low), max=float(high))
        self.add_scalars({f"{name}/{key}": value for key, value in numbers.items()}, step)

    def state_dict(self) -> dict[str, Any]:
        """How far this backend has written, as a checkpoint keeps it. Fits JSON."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:  # noqa: B027 - most keep nothing
        """Takes back what was written after the checkpoint that a run is resumed from.

        Args:
          state_dict: what `state_dict` gave when the checkpoint was written.
          step: iterations done by then.
        """

    def close(self) -> None:  # noqa: B027 - most backends of files have nothing to close
        """Finishes what is open. Closing twice is fine."""
