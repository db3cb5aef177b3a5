"""What the backends of plain files share: the config, the graph, PNG images, and cutting off after a restart."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jengine.config import write_config
from jengine.visualization.backend import BaseVisBackend
from jengine.visualization.image import encode_png


class FilesVisBackend(BaseVisBackend):
    """Writes to files below `save_dir`; how scalars and histograms are written is up to the class derived from it.

    Args:
      save_dir: the directory for its files.
      img_save_dir: directory for images below it; an image is `<name>_<step>.png`.
      config_save_file: file name of the config.
      scalar_save_file: file name of the scalars; all of them go there.

    Attributes:
      suffix: of the files that scalars and histograms are appended to.

    Raises:
      ValueError: `scalar_save_file` has another suffix.
    """

    suffix: ClassVar[str]

    def __init__(
        self, save_dir: str | os.PathLike[str], img_save_dir: str, config_save_file: str, scalar_save_file: str
    ) -> None:
        super().__init__(save_dir)
        if not scalar_save_file.endswith(self.suffix):
            raise ValueError(f"scalar_save_file is a {self.suffix} file, found {scalar_save_file!r}")
        self._images = self.save_dir / img_save_dir
        self._config = self.save_dir / config_save_file
        self._scalars = self.save_dir / scalar_save_file
        self._histograms = self.save_dir / f"histograms{self.suffix}"

    def add_config(self, config: str) -> None:
        """Writes the config file; it loads with `load_config`."""
        write_config(config, self._config)

    def add_graph(self, graph: str) -> None:
        """Writes `graph.txt`."""
        self.save_dir.mkdir(parents=True, exist_ok=True)
        (self.save_dir / "graph.txt").write_text(graph, encoding="utf-8")

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Writes `<img_save_dir>/<name>_<step>.png`; see `encode_png` for what an image is."""
        png = encode_png(image)
        path = self._images / f"{name}_{step}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)

    def state_dict(self) -> dict[str, Any]:
        """The size of each file that is appended to, in bytes."""
        return {"sizes": {path.name: path.stat().st_size for path in sorted(self.save_dir.glob(f"*{self.suffix}"))}}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Cuts the files off where they ended when the checkpoint was written."""
        for name, size in state_dict.get("sizes", {}).items():
            path = self.save_dir / name
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)


def append(path: pathlib.Path, text: str) -> None:
    """Appends to a file, complete on disk when the call returns; makes it and its directory where they are missing."""
    try:
        file = open(path, "ab")  # noqa: SIM115 - closed below; a line of the log is written every few iterations
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115
    with file:
        file.write(text.encode())
