"""What the backends of plain files share: the config, the graph, PNG images, and cutting off after a restart."""

import os
from collections.abc import Mapping
from typing import Any, BinaryIO, ClassVar

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
        self._scalars = scalar_save_file
        self._histograms = f"histograms{self.suffix}"
        self._open: dict[str, BinaryIO] = {}

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

    def append(self, name: str, text: str) -> None:
        """Appends to the file `name` below `save_dir`, complete on disk when the call returns.

        The file stays open until `close`: opening it costs more than a line.
        """
        file = self._open.get(name)
        if file is None:
            path = self.save_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._open[name] = open(path, "ab")  # noqa: SIM115 - see close
        file.write(text.encode())
        file.flush()  # not unbuffered: only a buffer goes on, or raises, where a full disk takes a part of the line

    def close(self) -> None:
        """Closes the files; writing again opens them again."""
        while self._open:
            self._open.popitem()[1].close()
