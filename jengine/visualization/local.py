"""The backend of plain files: one JSON object per line, PNG images, the config."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.registry import VISBACKENDS
from jengine.visualization.files import FilesVisBackend, append
from jengine.visualization.histogram import Histogram


@VISBACKENDS.register_module()
class LocalVisBackend(FilesVisBackend):
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

    suffix = ".json"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        img_save_dir: str = "vis_image",
        config_save_file: str = "config.py",
        scalar_save_file: str = "scalars.json",
    ) -> None:
        super().__init__(save_dir, img_save_dir, config_save_file, scalar_save_file)

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
            append(path, line)

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Appends a line with the counts and the edges of the bins to `histograms.json`."""
        line = {"name": name, "step": step, **histogram._asdict()}
        append(self._histograms, json.dumps(_jsonable(line), allow_nan=False) + "\n")


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
