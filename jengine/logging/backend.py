"""Interface of visualization backends."""

import abc
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jengine.config.errors import ConfigError
from jengine.config.storage import is_url
from jengine.logging.convert import Histogram

_PROGRESS = ("epoch", "iter")  # of training, which has curves of its own


class BaseVisBackend(abc.ABC):
    """One destination for the output of the visualizer, such as files or a server.

    A backend should open files and connections at the first write, and accept writes again after
    `close`.

    Args:
      save_dir: the directory for files; created when needed.

    Raises:
      ConfigError: `save_dir` is a URL.
    """

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        if is_url(save_dir):
            raise ConfigError(
                f"`save_dir` must be a local directory, got {os.fspath(save_dir)!r}; leave it "
                "out: with a URL as work_dir of the run, the files are sent there"
            )
        self.save_dir = pathlib.Path(save_dir)

    @abc.abstractmethod
    def add_config(self, config: str) -> None:
        """Write the config, given as the text of a Python file."""

    @abc.abstractmethod
    def add_graph(self, graph: str) -> None:
        """Write the model description as text."""

    @abc.abstractmethod
    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write `image`, uint8[H, W, C] with C of 1, 3 (RGB) or 4 (RGBA)."""

    @abc.abstractmethod
    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Write several values of one step.

        Args:
          scalar_dict: host numbers by name.
          step: the x-axis value in plots.
          file_path: a file below `save_dir` that file backends append the values to as well.
        """

    def name_scalars(self, scalar_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values under the names in this backend.

        The visualizer calls it with the loop as the value `mode`.

        By default validation names start with `val/` and test names with `test/`, so that they
        never share a curve with training. Without a `mode` the names are unchanged.
        """
        values = {name: value for name, value in scalar_dict.items() if name != "mode"}
        mode = scalar_dict.get("mode", "train")
        if mode == "train":
            return values
        values = {
            name.removeprefix(f"{mode}/"): value
            for name, value in values.items()
            if name not in _PROGRESS
        }
        return {f"{mode}/{name}": value for name, value in values.items()}

    def add_scalar(self, name: str, value: ArrayLike, step: int = 0) -> None:
        """Write one value of one step."""
        self.add_scalars({name: value}, step)

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Write a histogram.

        By default the mean, standard deviation, minimum and maximum as scalars.
        """
        low = histogram.edges[0]
        high = histogram.edges[-1]
        summary = dict(mean=histogram.mean, std=histogram.std, min=float(low), max=float(high))
        self.add_scalars({f"{name}/{key}": value for key, value in summary.items()}, step)

    def state_dict(self) -> dict[str, Any]:
        """Return the write position for a checkpoint, as a JSON-serializable dict."""
        return {}

    # Most keep no state
    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:  # noqa: B027
        """Discard everything written after the checkpoint that a run resumes from.

        Args:
          state_dict: the result of `state_dict` when the checkpoint was written.
          step: number of iterations completed at the checkpoint.
        """

    def close(self) -> None:  # noqa: B027 - most file backends have nothing to close
        """Flush and close open files and connections. Can be called twice."""
