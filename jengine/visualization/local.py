"""The backend of plain files: one JSON object per line, PNG images, the config."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.config import write_config
from jengine.registry import VISBACKENDS
from jengine.visualization.backend import BaseVisBackend
from jengine.visualization.image import encode_png


@VISBACKENDS.register_module()
class LocalVisBackend(BaseVisBackend):
    """Writes to files below `save_dir`.

    Scalars are lines of JSON, each complete on disk when the call returns. JSON has no NaN and no infinity: they are
    the strings "NaN", "Infinity" and "-Infinity", which `float()` reads.

    Args:
      save_dir: the directory for its files.
      img_save_dir: directory for images below it; an image is `<name>_<step>.png`.
      config_save_file: file name of the config.
      scalar_save_file: file name of the scalars; all of them go there.

    Raises:
      ValueError: `scalar_save_file` is no `.json` file.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        img_save_dir: str = "vis_image",
        config_save_file: str = "config.py",
        scalar_save_file: str = "scalars.json",
    ) -> None:
        super().__init__(save_dir)
        if not scalar_save_file.endswith(".json"):
            raise ValueError(f"scalar_save_file is a .json file, found {scalar_save_file!r}")
        self._images = self.save_dir / img_save_dir
        self._config = self.save_dir / config_save_file
        self._scalars = self.save_dir / scalar_save_file

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

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None) -> None:
        """Appends a line with the values and their `step` to the scalar file, and to `file_path` where given.

        Args:
          scalar_dict: numbers, strings, None, and lists and dicts of those; arrays are written as lists, those of one
            element as a number. A `step` among them wins over the argument.
          step: of the line.
          file_path: a `.json` file below `save_dir`.

        Raises:
          TypeError: a value that JSON cannot hold. ValueError: `file_path` is no `.json` file, or the scalar file.
        """
        line = json.dumps(_jsonable({**scalar_dict, "step": scalar_dict.get("step", step)}), allow_nan=False) + "\n"
        paths = [self._scalars]
        if file_path is not None:
            paths.append(self.save_dir / file_path)
            if paths[1].suffix != ".json" or paths[1] == self._scalars:
                raise ValueError(f"file_path is a .json file other than {self._scalars.name}, found {file_path!r}")
        for path in paths:
            _append(path, line)

    def state_dict(self) -> dict[str, Any]:
        """The size of each scalar file in bytes."""
        return {"sizes": {path.name: path.stat().st_size for path in sorted(self.save_dir.glob("*.json"))}}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Cuts the scalar files off where they ended when the checkpoint was written."""
        for name, size in state_dict.get("sizes", {}).items():
            path = self.save_dir / name
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)


def _append(path: pathlib.Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def _jsonable(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item, name or str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item, name) for item in value]
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        return _jsonable(array.item() if array.size == 1 else array.tolist(), name)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{name!r} is {type(value).__name__}, which JSON cannot hold; expected a number, a string or a list"
    )
